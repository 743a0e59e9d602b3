"""Pipeline stages: the graph cut along an axis of the mesh, and the schedule by which ranks run the parts."""
