package main

import (
	"encoding/json"
	"fmt"
	"math/rand"
	"reflect"
	"strings"

	"k8s.io/api/core/v1"
)

const (
	minManifests = 250
	maxManifests = 400
	// How often each field is set in all manifests together, at least.
	minUses = 2
)

var samples = map[string][]string{
	"image":     {"nginx", "nginx:latest", "nginx:1.25", "registry:5000/a/b", "registry:5000/a/b:v1", "a@sha256:" + strings.Repeat("0", 64), ""},
	"reference": {"nginx", "a:1", ""},
	"quantity":  {"0", "1", "100m", "1500m", "0.5", "1.5Gi", "64Mi", "1Gi", "8Gi", "1k", "1000", "2000", "1e3", "12E", "0.0001", "1n", "1u", "+1", "-1", "001", "1.0", "100Ki", "1000Mi", "9223372036854775807", "1.123456789123", "16Ei", "3Pi", "0.1Mi", "1E2", "0.00", "0.0Mi", "-0.5Gi", "1.", ".5", "9Ei", "1e-12"},
	"resource":  {"cpu", "memory", "hugepages-2Mi", "ephemeral-storage", "example.com/gpu"},
	"string":    {"a", "", "b c", "/x/y", "0", "true", "ä€", "a\nb", "<&>", "{}", "\"q\""},
	"policy":    {"Always", "Never", ""},
	"time":      {"2026-01-02T03:04:05Z", "1969-12-31T23:59:59Z"},
	"key":       {"a", "b", "example.com/c", "Z", "pod.beta.kubernetes.io/init-containers"},
}

type generator struct {
	random *rand.Rand
	// The chance that a field is set, in a thousand.
	density int
	uses    map[string]int
}

// generatedManifests set every field of a pod some times, and many not at all, empty or null.
func generatedManifests() []Answer {
	g := &generator{random: rand.New(rand.NewSource(1)), uses: map[string]int{}}
	var answers []Answer
	for number := 0; number < minManifests || g.leastUses("", reflect.TypeFor[v1.Pod]()) < minUses; number++ {
		if number == maxManifests {
			fail("some fields are hardly set")
		}
		g.density = []int{20, 60, 100}[number%3]
		pod := g.fields(reflect.TypeFor[v1.Pod]())
		pod["apiVersion"], pod["kind"] = "v1", "Pod"
		metadata, _ := pod["metadata"].(map[string]any)
		if metadata == nil {
			metadata = map[string]any{}
			pod["metadata"] = metadata
		}
		metadata["name"] = "web"
		if number%20 != 0 {
			delete(metadata, "uid")
		}
		manifest, err := json.Marshal(pod)
		check(err)
		answers = append(answers, Answer{Name: fmt.Sprintf("generated-%d", number), Manifest: manifest})
	}
	return answers
}

// leastUses is how often the field, or the rarest field inside of it, was set.
func (g *generator) leastUses(use string, kind reflect.Type) int {
	least := minUses
	if use != "" {
		least = min(least, g.uses[use])
	}
	for kind.Kind() == reflect.Pointer || kind.Kind() == reflect.Slice {
		kind = kind.Elem()
	}
	if kind.Kind() != reflect.Struct || opaque[kind.String()] {
		return least
	}
	for i := range kind.NumField() {
		field := kind.Field(i)
		inner := kind.String() + "." + field.Name
		if strings.HasPrefix(field.Tag.Get("json"), ",") {
			inner = ""
		}
		least = min(least, g.leastUses(inner, field.Type))
	}
	return least
}

func (g *generator) fields(structure reflect.Type) map[string]any {
	object := map[string]any{}
	for i := range structure.NumField() {
		field := structure.Field(i)
		tag := strings.Split(field.Tag.Get("json"), ",")
		if tag[0] == "" {
			for name, value := range g.fields(field.Type) {
				object[name] = value
			}
			continue
		}
		use := structure.String() + "." + field.Name
		kind := field.Type.Kind()
		isRequired := len(tag) == 1 && (kind == reflect.Slice || kind == reflect.Map || kind == reflect.Pointer)
		isWanted := g.leastUses(use, field.Type) < minUses && g.random.Intn(3) == 0
		if !isRequired && !isWanted && g.random.Intn(1000) >= g.chance(tag[0]) {
			continue
		}
		value := g.value(field.Type, tag[0])
		for isRequired && isEmpty(value) {
			value = g.value(field.Type, tag[0])
		}
		if value != nil {
			g.uses[use]++
		}
		object[tag[0]] = value
	}
	return object
}

func isEmpty(value any) bool {
	switch value := value.(type) {
	case nil:
		return true
	case []any:
		return len(value) == 0
	}
	return false
}

// Every pod has containers, and most have volumes: there the fields are that matter.
func (g *generator) chance(name string) int {
	switch name {
	case "spec":
		return 1000
	case "containers", "volumes":
		return 900
	case "metadata", "initContainers", "resources", "limits", "requests":
		return 400
	}
	return g.density
}

func (g *generator) value(kind reflect.Type, name string) any {
	if kind.Kind() != reflect.Struct && g.random.Intn(40) == 0 {
		return nil
	}
	switch kind.String() {
	case "resource.Quantity":
		return g.pick("quantity")
	case "intstr.IntOrString":
		return []any{80, "http", 0}[g.random.Intn(3)]
	case "v1.Time":
		return g.pick("time")
	case "v1.FieldsV1":
		return map[string]any{"f:metadata": map[string]any{"f:b<": map[string]any{}, ".": map[string]any{}}}
	}
	switch kind.Kind() {
	case reflect.Pointer:
		return g.value(kind.Elem(), name)
	case reflect.Struct:
		return g.fields(kind)
	case reflect.Slice:
		list := []any{}
		for range []int{0, 1, 1, 1, 2}[g.random.Intn(5)] {
			value := g.value(kind.Elem(), name)
			if value != nil {
				list = append(list, value)
			}
		}
		return list
	case reflect.Map:
		return g.object(kind, name)
	case reflect.String:
		return g.text(name, kind)
	case reflect.Bool:
		return g.random.Intn(2) == 0
	case reflect.Int32, reflect.Int64:
		return []int{0, 1, -1, 42, 8080, 420}[g.random.Intn(6)]
	}
	fail("no value of type " + kind.String())
	return nil
}

func (g *generator) object(kind reflect.Type, name string) any {
	object := map[string]any{}
	keys := "key"
	if kind.Elem().String() == "resource.Quantity" {
		keys = "resource"
	}
	for range g.random.Intn(4) {
		if value := g.value(kind.Elem(), name); value != nil {
			object[g.pick(keys)] = value
		}
	}
	return object
}

func (g *generator) text(name string, kind reflect.Type) string {
	switch {
	case name == "image" || name == "reference":
		return g.pick(name)
	case kind.Name() == "ContainerRestartPolicy":
		return g.pick("policy")
	}
	return g.pick("string")
}

func (g *generator) pick(of string) string {
	return samples[of][g.random.Intn(len(samples[of]))]
}
