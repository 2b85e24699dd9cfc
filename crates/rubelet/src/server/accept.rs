//! The `Accept` header, as upstream reads it.
//!
//! Owns: its alternatives and their order. Never: knows the available types.
//! Upstream: `goautoneg`.

/// One alternative.
#[derive(Debug)]
pub(super) struct Clause<'a> {
    main: &'a str,
    sub: &'a str,
    params: Vec<(&'a str, &'a str)>,
    quality: f32,
}

/// The best first.
pub(super) fn clauses(accept: &str) -> Vec<Clause<'_>> {
    let mut clauses: Vec<Clause<'_>> = accept.split(',').filter_map(Clause::parse).collect();
    let order = |clause: &Clause<'_>| (clause.main == "*", clause.sub == "*");
    clauses.sort_by(|a, b| b.quality.total_cmp(&a.quality).then(order(a).cmp(&order(b))));
    clauses
}

impl<'a> Clause<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(';');
        let media_type = parts.next()?.trim();
        let (main, sub) = if media_type == "*" { ("*", "*") } else { media_type.split_once('/')? };
        if sub.is_empty() || sub.contains('/') {
            return None;
        }
        let mut params: Vec<(&str, &str)> =
            parts.filter_map(|part| part.split_once('=')).map(|(name, value)| (name.trim(), value.trim())).collect();
        let quality = params.iter().find(|(name, _)| *name == "q").map(|(_, value)| value.parse().unwrap_or(0.0));
        params.retain(|(name, value)| *name != "q" && !value.is_empty());
        Some(Clause { main: main.trim(), sub: sub.trim(), params, quality: quality.unwrap_or(1.0) })
    }

    pub(super) fn param(&self, name: &str) -> Option<&'a str> {
        self.params.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    /// Exactly this type.
    pub(super) fn names(&self, media_type: &str) -> bool {
        media_type.split_once('/') == Some((self.main, self.sub))
    }

    /// This type, or a wildcard that covers it.
    pub(super) fn covers(&self, media_type: &str) -> bool {
        let (main, _) = media_type.split_once('/').expect("a media type of ours");
        self.names(media_type) || (self.sub == "*" && (self.main == main || self.main == "*"))
    }
}
