"""The contract between the programs: messages, the row codec, errors and transport."""
