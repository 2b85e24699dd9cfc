//! A pod as the text that upstream hashes: Go's structures, field by field, with their types.
//!
//! Owns: how spew writes a value. Never: which fields there are: `internal_types.txt`, printed by
//! `testbed/go/kubernetes/static-pods` once per version of Kubernetes.
//! Upstream: `k8s.io/utils/dump.ForHash`.

use std::{collections::BTreeMap, fmt, sync::LazyLock};

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use super::go_quantity::GoQuantity;

/// Upstream rounds quantities of a resource list up to thousandths.
const MILLI: i32 = -3;
/// Seconds from Go's year 1 to 1970.
const SECONDS_BEFORE_1970: i64 = 62_135_596_800;
/// A decoded time refers to the node's time zone, which the dump shows: this one is UTC.
const UTC_ZONE: &str = "(*time.Location){name:(string)Local zone:([]time.zone)[{name:(string)UTC offset:(int)0 isDST:(bool)false}] \
    tx:([]time.zoneTrans)[{when:(int64)-9223372036854775808 index:(uint8)0 isstd:(bool)false isutc:(bool)false}] \
    extend:(string)UTC0 cacheStart:(int64)-9223372036854775808 cacheEnd:(int64)9223372036854775807 \
    cacheZone:(*time.zone){name:(string)UTC offset:(int)0 isDST:(bool)false}}";

static TYPES: LazyLock<BTreeMap<&'static str, Type>> = LazyLock::new(|| types(include_str!("internal_types.txt")));

enum Type {
    /// A structure's fields, in order.
    Structure(Vec<Field>),
    /// A name for another type, `string` or `map[core.ResourceName]resource.Quantity`.
    Alias(&'static str),
    /// A special case here, because its fields are not those of its JSON.
    Opaque,
}

struct Field {
    name: &'static str,
    /// `.` if it is embedded: its fields are found in the object around it.
    json: &'static str,
    type_name: &'static str,
}

/// Writes a pod in its internal form, as JSON, to `out`.
pub(super) fn pod(pod: &Value, out: &mut impl fmt::Write) -> fmt::Result {
    typed("*core.Pod", Some(pod), out)
}

/// With its type before it, as the field of a structure.
fn typed(type_name: &str, value: Option<&Value>, out: &mut impl fmt::Write) -> fmt::Result {
    write!(out, "({type_name})")?;
    match (type_name.strip_prefix('*'), value) {
        (Some(_), None) => out.write_str("<nil>"),
        (Some(pointee), Some(_)) => plain(pointee, value, out),
        (None, _) => plain(type_name, value, out),
    }
}

/// Without its type, as the element of a list. None is Go's zero value.
fn plain(type_name: &str, value: Option<&Value>, out: &mut impl fmt::Write) -> fmt::Result {
    if let Some(element) = type_name.strip_prefix("[]") {
        return match value.and_then(Value::as_array) {
            None => out.write_str("<nil>"),
            Some(items) => list(items.iter(), out, |item, out| plain(element, Some(item), out)),
        };
    }
    if let Some((_, element)) = type_name.strip_prefix("map[").and_then(|rest| rest.split_once(']')) {
        return map(value, out, |item, out| plain(element, Some(item), out));
    }
    match TYPES.get(type_name) {
        Some(Type::Structure(fields)) => structure(fields, value, out),
        Some(Type::Alias(_)) if type_name == "core.ResourceList" => {
            map(value, out, |item, out| write!(out, "{}", quantity(Some(item)).round_up(MILLI).unwrap_or_default()))
        }
        Some(Type::Alias(name)) => plain(name, value, out),
        Some(Type::Opaque) => opaque(type_name, value, out),
        None => scalar(type_name, value, out),
    }
}

fn structure(fields: &[Field], value: Option<&Value>, out: &mut impl fmt::Write) -> fmt::Result {
    out.write_char('{')?;
    for (index, field) in fields.iter().enumerate() {
        if index > 0 {
            out.write_char(' ')?;
        }
        write!(out, "{}:", field.name)?;
        let inner = match field.json {
            "." => value,
            name => value.and_then(|value| value.get(name)).filter(|value| !value.is_null()),
        };
        typed(field.type_name, inner, out)?;
    }
    out.write_char('}')
}

fn list<T, W: fmt::Write>(
    items: impl Iterator<Item = T>,
    out: &mut W,
    mut write_item: impl FnMut(T, &mut W) -> fmt::Result,
) -> fmt::Result {
    out.write_char('[')?;
    for (index, item) in items.enumerate() {
        if index > 0 {
            out.write_char(' ')?;
        }
        write_item(item, out)?;
    }
    out.write_char(']')
}

fn map<W: fmt::Write>(
    value: Option<&Value>,
    out: &mut W,
    mut write_item: impl FnMut(&Value, &mut W) -> fmt::Result,
) -> fmt::Result {
    let Some(object) = value.and_then(Value::as_object) else { return out.write_str("<nil>") };
    let sorted: BTreeMap<&String, &Value> = object.iter().collect();
    out.write_str("map")?;
    list(sorted.into_iter(), out, |(key, item), out| {
        write!(out, "{key}:")?;
        write_item(item, out)
    })
}

fn scalar(type_name: &str, value: Option<&Value>, out: &mut impl fmt::Write) -> fmt::Result {
    match (type_name, value) {
        ("string", value) => out.write_str(value.and_then(Value::as_str).unwrap_or_default()),
        (_, Some(value)) => write!(out, "{value}"),
        ("bool", None) => out.write_str("false"),
        (_, None) => out.write_char('0'),
    }
}

fn opaque(type_name: &str, value: Option<&Value>, out: &mut impl fmt::Write) -> fmt::Result {
    match type_name {
        "resource.Quantity" => write!(out, "{}", quantity(value)),
        "intstr.IntOrString" => {
            let text = value.and_then(Value::as_str);
            let number = value.and_then(Value::as_i64).unwrap_or_default();
            let (is_text, text) = (u8::from(text.is_some()), text.unwrap_or_default());
            write!(out, "{{Type:(intstr.Type){is_text} IntVal:(int32){number} StrVal:(string){text}}}")
        }
        "v1.Time" => time(value, out),
        // `v1.FieldsV1`.
        _ => {
            out.write_str("{Raw:([]uint8)")?;
            list(compact(value.unwrap_or(&Value::Null)).bytes(), out, |byte, out| write!(out, "{byte}"))?;
            out.write_char('}')
        }
    }
}

/// A text, or the serialized form of [`GoQuantity`]: upstream computes some that have no text.
fn quantity(value: Option<&Value>) -> GoQuantity {
    let known = value.and_then(|value| match value {
        Value::String(text) => GoQuantity::parse(text.trim()),
        computed => GoQuantity::deserialize(computed).ok(),
    });
    known.unwrap_or_default()
}

fn time(value: Option<&Value>, out: &mut impl fmt::Write) -> fmt::Result {
    let time = value.and_then(Value::as_str).and_then(|text| text.parse::<Timestamp>().ok());
    let Some(time) = time else {
        return out.write_str("{Time:(time.Time){wall:(uint64)0 ext:(int64)0 loc:(*time.Location)<nil>}}");
    };
    // Nanoseconds count forwards, also before 1970.
    let nanos = i128::rem_euclid(time.as_nanosecond(), 1_000_000_000);
    let seconds = i128::div_euclid(time.as_nanosecond(), 1_000_000_000) + i128::from(SECONDS_BEFORE_1970);
    write!(out, "{{Time:(time.Time){{wall:(uint64){nanos} ext:(int64){seconds} loc:{UTC_ZONE}}}}}")
}

/// JSON as Go writes it: HTML characters are escaped.
fn compact(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

fn types(table: &'static str) -> BTreeMap<&'static str, Type> {
    table.lines().filter_map(|line| line.split_once(' ')).map(|(name, what)| (name, described(what))).collect()
}

fn described(what: &'static str) -> Type {
    let Some(fields) = what.strip_prefix("{ ").and_then(|rest| rest.strip_suffix(" }")) else {
        return if what == "opaque" { Type::Opaque } else { Type::Alias(what) };
    };
    let field = |field: &'static str| {
        let mut words = field.split(' ');
        Some(Field { name: words.next()?, json: words.next()?, type_name: words.next()? })
    };
    Type::Structure(fields.split("; ").filter_map(field).collect())
}
