"""Operations on shards with their internal communication, and the collectives of generated code."""
