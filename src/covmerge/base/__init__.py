"""What every floor may use: errors, types, text, sizes, memory; nothing of covmerge above it."""
