"""What results say: aggregated numbers, tables, and a page to look at them."""
