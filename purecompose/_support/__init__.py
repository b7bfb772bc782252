"""What the rest of the package stands on: argument checks, tables, files, devices, warnings."""
