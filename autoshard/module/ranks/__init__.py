"""The module under torch.distributed: agreement of ranks, parameters, inputs."""
