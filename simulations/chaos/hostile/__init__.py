"""Programs that attack a federation while it trains, and what comes of it."""
