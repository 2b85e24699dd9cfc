//! Effects: the only I/O on behalf of pods.
