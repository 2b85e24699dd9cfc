//go:build tools

// Package tools names what `cargo xtask conformance` builds, so that go.mod and go.sum pin it.
package tools

import (
	_ "github.com/onsi/ginkgo/v2/ginkgo"
	_ "k8s.io/kubernetes/test/e2e"
	_ "k8s.io/kubernetes/test/images/agnhost"
)
