"""Typed argument sections: YAML files in, one frozen `NeoXArgs` out. Imports no torch."""
