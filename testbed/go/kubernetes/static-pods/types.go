package main

import (
	"fmt"
	"io"
	"reflect"
	"sort"
	"strings"

	"k8s.io/api/core/v1"
	api "k8s.io/kubernetes/pkg/apis/core"
)

// Types whose fields are not those of their JSON.
var opaque = map[string]bool{
	"resource.Quantity":  true,
	"intstr.IntOrString": true,
	"v1.Time":            true,
	"v1.FieldsV1":        true,
}

// Fields of internal types that v1 keeps in the pod's specification.
var moved = map[string]bool{
	"PodSecurityContext.HostNetwork":           true,
	"PodSecurityContext.HostPID":               true,
	"PodSecurityContext.HostIPC":               true,
	"PodSecurityContext.ShareProcessNamespace": true,
	"PodSecurityContext.HostUsers":             true,
}

type table struct {
	lines map[string]string
	types map[string]reflect.Type
}

// printTypes writes a line per named type: a kind, or a structure's fields as name, JSON name and type.
// The JSON name of an embedded structure is `.`: its fields are those of the object around it.
func printTypes(out io.Writer) {
	table := table{lines: map[string]string{}, types: map[string]reflect.Type{}}
	table.add(reflect.TypeFor[api.Pod](), reflect.TypeFor[v1.Pod]())
	names := make([]string, 0, len(table.lines))
	for name := range table.lines {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		fmt.Fprintf(out, "%s %s\n", name, table.lines[name])
	}
}

func (t *table) add(internal, external reflect.Type) {
	name := internal.String()
	switch {
	case internal.Name() == "" && internal.Kind() == reflect.Map:
		t.add(internal.Key(), external.Key())
		t.add(internal.Elem(), external.Elem())
		return
	case internal.Name() == "":
		t.add(internal.Elem(), external.Elem())
		return
	case internal.PkgPath() == "":
		return
	}
	if known, ok := t.types[name]; ok {
		if known != internal {
			fail("two types are called " + name)
		}
		return
	}
	t.types[name] = internal
	switch {
	case opaque[name]:
		t.lines[name] = "opaque"
	case internal.Kind() == reflect.Struct:
		t.lines[name] = t.fields(internal, external)
	case internal.Kind() == reflect.Map:
		t.add(internal.Key(), external.Key())
		t.add(internal.Elem(), external.Elem())
		t.lines[name] = fmt.Sprintf("map[%s]%s", internal.Key(), internal.Elem())
	default:
		t.lines[name] = internal.Kind().String()
	}
}

func (t *table) fields(internal, external reflect.Type) string {
	var fields []string
	for i := range internal.NumField() {
		field := internal.Field(i)
		known, ok := external.FieldByName(field.Name)
		if !ok && moved[internal.Name()+"."+field.Name] {
			known, ok = reflect.TypeFor[v1.PodSpec]().FieldByName(field.Name)
		}
		if !ok {
			fail(fmt.Sprintf("v1 has no %s.%s", internal.Name(), field.Name))
		}
		tag := strings.Split(known.Tag.Get("json"), ",")
		if tag[0] == "" {
			tag[0] = "."
		}
		t.add(field.Type, known.Type)
		fields = append(fields, fmt.Sprintf("%s %s %s", field.Name, tag[0], field.Type))
	}
	return "{ " + strings.Join(fields, "; ") + " }"
}
