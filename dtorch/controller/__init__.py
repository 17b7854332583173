"""The process between one client and its workers: routes, counts acknowledgements, watches. Imports no torch."""
