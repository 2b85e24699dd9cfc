//! From a manifest to a static pod: decoding, defaults, validation, identity.
