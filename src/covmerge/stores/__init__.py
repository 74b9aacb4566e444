"""Where bytes lie, and how they are opened, listed and written; nothing above calls the system for it."""
