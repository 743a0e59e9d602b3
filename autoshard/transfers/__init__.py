"""Transfers: from any layout on any mesh to any layout on any mesh."""
