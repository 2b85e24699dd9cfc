//go:build tools

// Package tools names what `cargo xtask` builds, so that go.mod and go.sum pin it.
package tools

import _ "sigs.k8s.io/metrics-server/cmd/metrics-server"
