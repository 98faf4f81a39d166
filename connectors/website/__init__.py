"""The pages of a website, by its sitemaps and feeds."""
