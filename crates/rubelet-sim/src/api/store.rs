//! The state of the fake API server: objects as JSON, their versions, and the history for watches.
//!
//! Owns: one increasing version for all objects, the history window, reachability. Never: interprets a request.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    sync::Arc,
};

use rubelet_kube::port::{ObjectPath, WatchEvent};
use serde_json::{Value, json};

/// The history length of watches, in the order of a real server's.
const HISTORY: usize = 1_000;

#[derive(Debug, Default)]
pub(crate) struct Store {
    objects: BTreeMap<Key, Arc<Value>>,
    version: u64,
    history: VecDeque<Change>,
    /// Changes up to this version are expired.
    forgotten: u64,
    uids_given: u64,
    pub reach: Reach,
    pub streaming: Streaming,
    /// Objects with this name prefix get a 500 for every write.
    pub failing: BTreeSet<(&'static str, String)>,
    /// Terminating namespaces: nothing is created in them.
    pub ending_namespaces: BTreeSet<String>,
    /// A second server of the cluster with a stale cache, and whether the agent is connected to it.
    replica: Option<Replica>,
    is_on_replica: bool,
    /// Increases when connections are cut: older connections are dead.
    pub epoch: u32,
    /// Wakes watchers after a change.
    is_stirred: bool,
}

/// What happens to a request of the agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reach {
    #[default]
    Open,
    /// Connection refused.
    Refused,
    /// Packets are dropped: no response, and watches are silent.
    Silent,
    /// The agent's credentials have expired: 401 for every request. Open watches stay open.
    Unauthorized,
}

/// How the server handles `sendInitialEvents`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Streaming {
    #[default]
    Served,
    /// Its WatchList gate is off: 422.
    Refused,
    /// It ignores the option: the objects arrive, and no bookmark ends them.
    Ignored,
}

/// The content of a stale cache.
#[derive(Clone, Debug)]
struct Replica {
    version: u64,
    objects: BTreeMap<Key, Arc<Value>>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub resource: String,
    /// Empty for what has none.
    pub namespace: String,
    pub name: String,
}

impl Key {
    pub(crate) fn of(path: &ObjectPath, name: &str) -> Self {
        let namespace = path.namespace.clone().unwrap_or_default();
        Key { resource: path.resource.to_owned(), namespace, name: name.to_owned() }
    }

    pub(crate) fn pod(name: &str) -> Self {
        Key { resource: "pods".to_owned(), namespace: "default".to_owned(), name: name.to_owned() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.resource, self.name)
    }
}

#[derive(Debug)]
struct Change {
    version: u64,
    key: Key,
    before: Option<Arc<Value>>,
    after: Option<Arc<Value>>,
}

/// The selected part of a collection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Selection {
    resource: String,
    namespace: Option<String>,
    fields: Vec<(String, String)>,
}

impl Selection {
    pub(crate) fn new(collection: &ObjectPath, query: &[(&'static str, String)]) -> Self {
        let selectors = query.iter().filter(|(name, _)| *name == "fieldSelector").flat_map(|(_, text)| text.split(','));
        let fields = selectors.filter_map(|field| field.split_once('='));
        Selection {
            resource: collection.resource.to_owned(),
            namespace: collection.namespace.clone(),
            fields: fields.map(|(path, value)| (path.to_owned(), value.to_owned())).collect(),
        }
    }

    fn has(&self, key: &Key, object: &Value) -> bool {
        let field = |path: &str| object.pointer(&format!("/{}", path.replace('.', "/"))).and_then(Value::as_str);
        self.resource == key.resource
            && self.namespace.as_ref().is_none_or(|namespace| *namespace == key.namespace)
            && self.fields.iter().all(|(path, value)| match path.strip_suffix('!') {
                Some(path) => field(path) != Some(value),
                None => field(path) == Some(value),
            })
    }
}

/// The requested history has expired.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Forgotten;

impl Store {
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn object(&self, key: &Key) -> Option<&Arc<Value>> {
        self.objects.get(key)
    }

    pub(crate) fn of(&self, resource: &str) -> impl Iterator<Item = (&Key, &Arc<Value>)> {
        self.objects.iter().filter(move |(key, _)| key.resource == resource)
    }

    /// As etcd has it.
    pub(crate) fn list(&self, selection: &Selection) -> Value {
        listed(&self.objects, self.version, selection)
    }

    /// As the cache of the agent's server has it.
    pub(crate) fn cached_list(&self, selection: &Selection) -> Value {
        match self.lagging() {
            Some(replica) => listed(&replica.objects, replica.version, selection),
            None => self.list(selection),
        }
    }

    /// The version of the cache of the agent's server.
    pub(crate) fn cached_version(&self) -> u64 {
        self.lagging().map_or(self.version, |replica| replica.version)
    }

    /// Whether the agent is connected to a server with a stale cache.
    pub(crate) fn is_behind(&self) -> bool {
        self.lagging().is_some()
    }

    fn lagging(&self) -> Option<&Replica> {
        self.replica.as_ref().filter(|_| self.is_on_replica)
    }

    /// Freezes the second server's cache. A frozen one stays as it is.
    pub(crate) fn fall_behind(&mut self) {
        if self.replica.is_none() {
            self.replica = Some(Replica { version: self.version, objects: self.objects.clone() });
        }
    }

    /// Cuts the agent's connections; new ones go to the second server.
    pub(crate) fn fail_over(&mut self) {
        self.is_on_replica = true;
        self.cut_connections();
    }

    pub(crate) fn catch_up(&mut self) {
        self.replica = None;
        self.is_on_replica = false;
        self.is_stirred = true;
    }

    pub(crate) fn new_uid(&mut self) -> String {
        self.uids_given += 1;
        format!("uid-{:04}", self.uids_given)
    }

    /// Creates or replaces; the object gets its version here.
    pub(crate) fn put(&mut self, key: Key, mut object: Value) -> Arc<Value> {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let object = Arc::new(object);
        let before = self.objects.insert(key.clone(), object.clone());
        self.note(Change { version: self.version, key, before, after: Some(object.clone()) });
        object
    }

    /// Watchers get the last object, with the version of its deletion.
    pub(crate) fn remove(&mut self, key: &Key) {
        let Some(before) = self.objects.remove(key) else { return };
        self.version += 1;
        let mut last = Value::clone(&before);
        last["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.note(Change { version: self.version, key: key.clone(), before: Some(Arc::new(last)), after: None });
    }

    /// A real server keeps them for an hour.
    pub(crate) fn expire_events(&mut self) {
        self.objects.retain(|key, _| key.resource != "events");
    }

    fn note(&mut self, change: Change) {
        self.history.push_back(change);
        if self.history.len() > HISTORY
            && let Some(oldest) = self.history.pop_front()
        {
            self.forgotten = oldest.version;
        }
        self.is_stirred = true;
    }

    /// Watchers that were behind must relist.
    pub(crate) fn forget_history(&mut self) {
        self.history.clear();
        self.forgotten = self.version;
    }

    pub(crate) fn cut_connections(&mut self) {
        self.epoch += 1;
        self.is_stirred = true;
    }

    pub(crate) fn set_reach(&mut self, reach: Reach) {
        self.reach = reach;
        self.is_stirred = true;
    }

    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.is_stirred)
    }

    pub(crate) fn remembers(&self, version: u64) -> bool {
        version >= self.forgotten
    }

    /// The first change after `position` that matches the selection; `position` advances.
    pub(crate) fn next_change(
        &self,
        selection: &Selection,
        position: &mut u64,
    ) -> Result<Option<WatchEvent>, Forgotten> {
        if !self.remembers(*position) {
            return Err(Forgotten);
        }
        let first = self.history.partition_point(|change| change.version <= *position);
        let known = self.cached_version();
        for change in self.history.iter().skip(first).take_while(|change| change.version <= known) {
            *position = change.version;
            let had = change.before.as_ref().filter(|object| selection.has(&change.key, object));
            let has = change.after.as_ref().filter(|object| selection.has(&change.key, object));
            let event = match (had, has) {
                (None, None) => continue,
                (None, Some(after)) => WatchEvent::Added(after.to_string().into()),
                (Some(_), Some(after)) => WatchEvent::Modified(after.to_string().into()),
                (Some(before), None) => WatchEvent::Deleted(before.to_string().into()),
            };
            return Ok(Some(event));
        }
        Ok(None)
    }
}

fn listed(objects: &BTreeMap<Key, Arc<Value>>, version: u64, selection: &Selection) -> Value {
    let items = objects.iter().filter(|(key, object)| selection.has(key, object));
    let items: Vec<&Value> = items.map(|(_, object)| &**object).collect();
    json!({ "metadata": { "resourceVersion": version.to_string() }, "items": items })
}
