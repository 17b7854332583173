"""Values every layer shares: errors, configuration, placements, meshes and tensor specs. Imports nothing above it."""
