//go:build tools

// Package tools names what `cargo xtask` builds, so that go.mod and go.sum pin it.
package tools

import (
	_ "github.com/kubernetes-csi/external-provisioner/v5/cmd/csi-provisioner"
)
