"""Plain English words to make lists of: nouns, adjectives and verbs, in lower case.

None is a part of another, so to find one in a text is to find that word.
"""

_TEXT = """
ability abrupt absence absorb absurd academy accent accept access account accuse achieve acorn
acquire acre action active acute adapt address admiral admire admit adopt advance adverb adverse
advice advise aerial affair afford agency agenda agent agile agree airport alarm album alcohol
alert algebra alien alley almanac almond alphabet altar amateur amber ambition ambush amount ample
amulet amuse analyst analyze anatomy anchor ancient angel anger animal ankle announce annoy annual
antenna anthem antler anvil anxious apartment appeal appetite applaud apple approve apron aquarium
arcade archer archive arctic arena argue argument armchair army aroma arrange arrest arrival arrive
arrow article artist ashtray aspect asphalt assault asset assist athlete atlas atomic attach attack
attend attic attract auction audience august aunt author autumn avalanche avenue average avoid
awake award awful axis axle azure baby bachelor bacon badge bagpipe bakery balance balcony ballet
balloon bamboo banana bandage bandit banjo banker banner banquet barber bargain barley barn barrel
barren barrier basement basic basin basket bathe battery battle bazaar beach beacon bear beaver
become bedroom bee beggar begin behave behavior belief belong bench benefit berry betray beverage
bicycle billiard biology bird birthday biscuit bishop bitter blacksmith blade blame blank blast
bleak blender bless blind blink blizzard block blossom blouse blueprint blush boast bobbin body
bogus boil bold bolt bomb bonus border borrow bottle boulder bounce boundary bouquet bowl boxer
bracelet brain branch brass brave bread breathe breeze brewer bribe brick bride bridge brief
brigade bright bring brisk brittle broad broccoli broker bronze brook broom brother bruise bubble
bucket buckle budget buffalo bugle builder bulb bulky bullet bumper bundle bungalow burden bureau
burger burglar business busy butcher butter button buyer buzzer cabbage cabin cable cactus cadet
cafe cage calculate calendar calf calm camel camera campaign canal cancel candle candy cannon canoe
canvas canyon capital captain capture caravan carbon career careful cargo carnival carpet carrot
cartoon carve cascade cashier casino cask castle casual cattle cautious cavern ceiling celebrate
cellar cement census center century ceramic cereal ceremony chain chalk champion chance channel
chapel chapter charcoal charity charm chart chase cheap cheerful cheese chef chemist cherry chess
chew chicken chief child chilly chimney chin chisel chocolate choice choir choke chop chord chorus
chronic church cider cigar cinema cinnamon circle circus citizen civil claim clap clarinet classic
classroom clay clean clear clerk clever client cliff climate climb cling clinic cloak clock closet
cloud clover clown club clue clumsy coach coarse coast cobbler cobweb cocoa coconut code coffee
coil coin collar collect college collide colony colossal column combine comedy comet comfort
command commit compact company compare compass compete complaint complex compose computer conceal
concert conclusion concrete conduct cone conference confess conflict confuse congress connect
conquer consider consist construct consul consume contain contest context continue contract convent
convert convince cookie cool copper copy coral cordial corkscrew corner corridor cosmos costly
costume cottage cotton couch cough council counsel county couple courage cousin cow cozy crab
cradle crash crater crawl crayon crazy creamy create creature credit creek creep crest cricket
crime crisp criticize crocus crop crossroad crowd crown crude cruel cruise crumb crush crystal cube
cucumber culture cunning cupboard curfew curiosity curious curly currency curtain curve cushion
custom cyclone cylinder cymbal dagger dairy daisy damage damp dance dare daring darkness data
daughter dawn daybreak deadline deadly dealer death debate debt decade deceive decent decision
declare decline decorate deep deer defeat defense degree delay delicate delight delivery deluxe
demand democracy dense dentist deny depart depend deposit depth deputy describe desert deserve
design desk dessert destroy detail detective develop device devil devoted diagram dialect dialogue
diamond diary dice diet dig dim dinner diploma dirt disaster discount discover disease dish disk
dislike dispute dissolve distance district ditch diver divide divine divorce dock doctor document
dog dollar dolphin domain domino donate donkey donor door double doubt dough dove drag drama
drastic draw dream dreary drift drink drip driver drought drown drowsy drum dual duck duel dull
dumb dungeon durable dusty duty dwarf dynamo eager eagle early earn earring earth easel eastern
echo eclipse ecology economy editor education effect effort eggplant elastic elbow elderly election
electric elegance elephant elevator elk embassy emblem embrace emerald eminent emotion emperor
employer empty endless endure energy engine engraver enigma enjoy enlarge enormous ensure entrance
envelope envoy epic episode epoch equal equation eraser errand erratic error escape escort essay
estate ethical evening event evidence exact exam exceed exchange excited excuse exhibit exile exist
exit exotic expand expect expense expert explode explorer export extend extract extreme eyebrow
fable fabric facade factory faculty fade failure faint fairy faith falcon false family famine
famous fancy farmer fashion fasten fatal father fatigue faucet favor feast feather feature federal
feeble fellow feminine fence ferry fertile festival fetch fever fiber fiction fiddle field fierce
figure filter final finger fire firm fiscal fish flag flaky flame flannel flap flask flatten flavor
flee flexible flight flint float flock flood floor flour flow fluffy fluid flute focus fog fold
folklore fond food foolish football forbid forehead foreign forest forget forgive formal formula
fossil foundry fountain fox fragment frame frantic freedom freeze frequent fresh friend frighten
fringe frog frontier frost frozen frugal fruit fuel fugitive function funeral fungus furnace
furniture future fuzzy gadget galaxy gallery gallon gamble garage garden garlic garment garnet
gasoline gate gather gaze gear gecko gender general generous genius gentle genuine geology gesture
geyser ghastly ghost giant giggle ginger giraffe girl glacier glad glance glass glider glimpse
globe gloomy glory glossy glove glow glue goat goblet goblin gold goose gorilla gospel gossip
government governor grab grace gracious grain grammar grand granite grape graph gravel gravity
grease greasy great greedy green greet grill grim grind grip groan grocer grotto group grove growth
grumble grumpy guard guess guest guide guild guilty guitar gulf gutter gymnast gypsum habit haircut
half hallway halo hamlet hammer hammock hamster handle hangar happen happy harbor hardy harmony
harness harp harvest hasty hatchet hawk hazard hazel headline health heart heater heaven heavy
hectic hedge heel height heir helmet helpful herb heritage hermit hero hesitate hidden hideous
highway hinge hire historic history hobby hockey holiday hollow homely homework honest honey
honorary hood hook horizon horn horse hospital hostel hostile hotel hour household hover hug human
humble humid humor hunger hungry hunter hurdle hurricane hurry husband hut hydrogen hyena hymn icon
idea identify idiom idle idol igloo ignorant ignore illegal illness image imagine immense impact
import impress improve impulse inch include income increase index industry infant infinite
inflation inform inherit initial inject injure inlet innocent insect insist inspector inspire
instinct institute insult insurance intend intense internal interrupt interval introduce invader
invention invite invoice iris iron irritate island issue itinerary ivory ivy jacket jaguar jail
janitor jar jasmine javelin jaw jazz jealous jelly jewel jigsaw jockey jog joint joke jolly journal
journey judge juggle juice juicy jumbo jump jungle junior juniper jury justice justify kangaroo
kayak keen kennel kernel kettle keyboard kick kidney kimono kind kingdom kiosk kitchen kite kitten
knee knife knight knit knob knock knot knowledge koala label labor ladder lady lagoon lake lamb
lamp language lantern laser laugh launch laundry lava lavish lawn lawyer layer lazy leader leaf
league leather leave lecture legacy legend leisure lemon length lenient leopard lesson lethal
letter lettuce level liberty library license lick lifeboat lighthouse likely lilac lily lime limit
linear linen liner lion liquid listen literal lively lizard lobby lobster local locker locomotive
lofty logic lonely loose lotus lounge lousy loyal lucky lullaby lumber lunar lunch lung luscious
luxury lynx lyric magazine magical magnet mailbox maintain majestic majesty major mallet mammal
manage mango manner mansion mantle manual maple marathon marble march margin marina marine marker
market marriage married marry marsh mask mason massage massive master match material matrix
mattress mature maximum mayor meadow meal mean measure mechanic medal medical medicine medium
mellow melody melon melt member memory mental mention menu merchant mercury merit merry message
messy metal meteor method metro microbe midnight mighty migrant mild military milk mill mineral
mingle minister minor mint minute miracle mirror mission mistake misty mitten mixture moan mobile
model modest moist molecule molten moment monarch monastery money monk monster month monument moody
moon moral morning mosaic mosque moss motel mother motor mound mountain mourn mouse mouth movie mud
muffin multiply murmur muscle museum mushroom mushy music mustard mutual mystery mystic myth naive
napkin narrator nasty nation nature naughty nautical navy neat nebula necklace nectar needle
neighbor nephew nerve network neutral newspaper nickel niece nimble ninja noble nod noise nomad
noodle noon normal north notebook notice novel nugget nursery nutty nylon oasis oath obedient obey
object oboe observe obstacle obtain obvious occur ocean octagon octopus odd odor offend officer
olive olympics omelet onion opal opera opinion opponent oppose option orange orbit orchard orchid
ordinary organ origin ornate orphan ostrich outer outfit outlaw oval oven overcome owner oxygen
oyster pack paddle page paint pajamas palace pale palm pancake panda panel panic panther parade
parallel parcel pardon parent park parrot partial partner passage passive passport pasta pastry
patent path patient patrol pattern pause payment peaceful peach peacock peanut peasant pebble pedal
pelican penalty pencil penguin pension people pepper percent perfect perform perfume period perky
permit person persuade petal petty phantom pharmacy phrase physics piano picnic picture pier pig
pillow pilot pine pioneer pious pirate piston pitcher pizza planet plank plaster plastic plate
platform plaza plead pledge plow plum pocket poem poet point poison poker polar policy polish
polite polo pond pony popcorn poppy popular porch portable portrait position possess postage
postpone potato potent pottery pour powder practice prairie prayer preach precious precise preface
prefer premium prepare present preserve president pretend pretzel previous price priest primary
prime prince prison privacy private prize problem proceed process produce profit program project
promise prompt proof prophet protein protest proud provide province prune public publisher pudding
pull pump punctual pungent punish puny puppet puppy pure purpose push puzzle pyramid python quail
quaint quality quarrel quarry quartz queasy queen queue quick quiet quilt quirky quit quota quote
rabbi raccoon racket radar radiant radical radio raft ragged rail raisin random ransom rapid
rapture rare raven razor reactor reader realize reason rebel receipt receive recipe reckless
recognize record recover recruit reduce referee reflect refuge refuse regal region regret reject
rejoice relative relaxed release reliable relief religion remain remedy remind remote remove repair
repeat replace reply reptile request rescue resist resort respect result retire retreat reveal
revenge revise revolver reward rhyme rhythm ribbon riddle rifle rinse riot ripe ritual roast robber
robin robot robust rocket rodent romance rookie root rope rose rosy rotten round route rowboat
rowdy royal rubber ruby rudder ruin ruler rumor runway rural rustic rusty sack saddle safari saga
sailor saint salad salary salmon saloon salt salute sand sardine satellite satisfy sauce sausage
savage scale scandal scarce scarf scarlet scary scatter scene scholar school science scissors scold
scooter scorch score scorpion scout scrape scratch scream screen scribble script scroll sculptor
seal search season seat second secret sector secure seed select seller senate senior sentence
separate sequel sequence serene sermon servant session settler severe shabby shadow shady shaft
shallow shampoo shape shark shatter shave sheep shelf shell sheriff shield shiny shirt shiver shock
shoe shore shoulder shout shovel shower shrimp shrink shrug sibling sick sigh signal silence silent
silk silly silver simple sincere sink siren sister skater skeleton skill skinny skip skirt skull
slap sleek sleepy sleeve slender slice slim slipper slogan slope sloppy slow smart smash smile
smoke smooth snail snake snappy snatch sneaky sneeze sniff snore snow soak soap sober soccer
society soda sofa soft soil solar soldier solid somber sonnet sorrow soul soup sour south soybean
spare spear species speech spell sphere spice spider spiky spill spin spiral spirit splash splendid
spoil sponge spooky spoon spouse spring sprinkle sprout spy squad squash squeak squeeze squirrel
stable stadium staff staircase stale stamp stare startle static statue steady steak steal steam
steel steep stem sticker sticky stiff stingy stir stomach stone stool stork storm stout stove
strange strategy straw stream street strengthen stretch strike string strive stroll struggle
stubborn studio stumble sturdy style subject submit subtle subway success sudden suffer sugar
suggest suitcase sullen summer sunny sunset super support suppose surface surgeon surprise
surrender survive suspect suspend sustain swallow swamp swan swear sweater sweet swift swimmer
swing sword syllable symbol symphony syrup tablet tackle tacky tadpole tailor talent tall tame
tango tank target tariff tasty tavern tax teacher tease tedious telegram telescope temper temple
temporary tempt tenant tender tennis terminal terrace terrify territory textbook texture thank
theft theme theory therapy thermos thick thief thimble thin thirsty thistle thread threat thrifty
throat throne throw thumb thunder ticket tickle tide tidy tiger tight timber timer timid tiny
tiresome title toast tobacco toilet token tolerate tomato tongue topic topple torch tornado
tortoise torture tourist towel tower toxic toy tractor trade tradition traffic tragedy tragic train
traitor tranquil transit translate trap travel treasure treaty tremble trial triangle tribe tribute
trick trigger triumph trivial trolley trombone trophy tropical trousers truck trumpet trunk trust
truth tube tugboat tulip tumor tunnel turbine turkey turnip turtle tutor tuxedo twilight twin twist
typhoon typical tyrant ugly umbrella umpire uncle uniform union unique unit universe unlock upper
upright uproar upset urban urgent useful utensil utopia vacant vacation vaccine vacuum vague vain
valid valve vampire vanilla vanish vapor variety varnish vase vast vault vegetable vehicle veil
vein velocity velvet vendor venom veranda verbal verdict vessel veteran vicious victim victory
video viewer village villain vinegar violin viral virtue virus visa visible vision visit vital
vitamin vivid volcano volume voter vowel voyage vulgar vulture waffle wagon waist waiter walker
wallet walnut walrus waltz wander wardrobe warm warn warrior wary wasp waste watch water wave weak
wealth weapon weary weather weave wedding weed weekend weep weight weird welcome well western whale
wheat whine whip whisker whisper whistle wicked wide widow width wig wild willow window wink winner
winter wipe wire wisdom wise wish witness witty wizard wobble wolf woman wonder wooden woodpecker
workshop world worm worry wrap wreck wrench wrestle wrist writer wrong yacht yard yawn yeast yell
yield yogurt yolk young youth zealous zebra zenith zero zesty zipper zodiac zone
"""
WORDS = tuple(_TEXT.split())
