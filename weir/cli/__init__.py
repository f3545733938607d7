"""Floor 4: what a person types. Starts the services as processes; never imports them, nor torch."""
