//! A container as the runtime sees it: its CRI configuration, labels, hash.
