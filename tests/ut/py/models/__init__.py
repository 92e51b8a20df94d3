"""Tests of the models; a package, so that its conftest has a name of its own."""
