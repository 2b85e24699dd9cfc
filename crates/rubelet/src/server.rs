//! What others may read: the root-only socket of the command line, the health port, the read-only port.
