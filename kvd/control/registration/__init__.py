"""Where an engine's scheduler and ranks meet, and what is checked of the memory they bring."""
