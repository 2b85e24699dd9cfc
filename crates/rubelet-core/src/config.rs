//! KubeletConfiguration v1beta1: types, defaults, merging, validation, feature gates.
