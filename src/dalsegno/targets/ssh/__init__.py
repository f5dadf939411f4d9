"""A cluster on machines that are reached over ssh. `SshTarget` is the operator's side, `HeadTarget` the head's."""
