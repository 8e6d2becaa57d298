"""What the actors say to each other: ids, messages, parameters, configuration, errors."""
