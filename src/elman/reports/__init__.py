"""A run, or a forecast, on one page that needs nothing but a browser."""
