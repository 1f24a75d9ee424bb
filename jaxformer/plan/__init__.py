"""The plan of a run on devices that are not here: memory, communication and time, from its compiled train step."""
