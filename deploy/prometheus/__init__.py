"""Rules, scrape configuration, and the table of what there is to scrape."""
