"""An engine on a GPU whose KV goes through kvd: time to first token, computed and loaded."""
