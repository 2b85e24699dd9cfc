//! Where pods come from: a directory of manifests, a URL.
//!
//! Upstream: `config/file.go`, `config/http.go`.
