// Lets Go take the declaration of a function without a body: main.go, applyDefaults.
