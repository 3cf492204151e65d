"""The processes of a run on one host: which there are, what each is given, and how their programs start and end."""
