"""Measurements of serving: clients, cells, tables and their files."""
