//! The exploration: breadth first, so that the path to a broken rule is the shortest.
//!
//! Owns: the graph of states, and the search for states from which nothing settles.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::{
    digest::digest,
    rules,
    state::{Kind, State, Successor},
};

/// A rule was broken, with the shortest way there.
#[derive(Debug)]
pub(super) struct Violation {
    pub rule: String,
    pub path: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, after {} transitions:", self.rule, self.path.len())?;
        self.path.iter().try_for_each(|step| writeln!(f, "  {step}"))
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Figures {
    pub states: usize,
    pub transitions: usize,
    /// Transitions to the farthest state.
    pub depth: u32,
    pub settled: usize,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Figures { states, transitions, depth, settled } = self;
        write!(f, "{states} states, {transitions} transitions, depth {depth}, {settled} settled")
    }
}

/// How a state was first reached.
#[derive(Clone, Copy)]
struct Origin {
    from: u32,
    /// Among the successors of that state.
    number: u16,
    depth: u32,
}

pub(super) struct Explorer {
    initial: State,
    origins: Vec<Origin>,
    /// Transitions that happen in the end, if nothing else does.
    edges: Vec<(u32, u32)>,
    known: BTreeMap<u64, u32>,
    queue: VecDeque<(u32, State)>,
    figures: Figures,
}

/// Explores every state that can be reached.
pub(super) fn explore(initial: State) -> Result<Figures, Violation> {
    let mut explorer = Explorer {
        initial: initial.clone(),
        origins: vec![Origin { from: 0, number: 0, depth: 0 }],
        edges: Vec::new(),
        known: BTreeMap::from([(digest(&initial), 0)]),
        queue: VecDeque::from([(0, initial)]),
        figures: Figures::default(),
    };
    explorer.run()?;
    explorer.check_cycles()?;
    Ok(Figures { states: explorer.origins.len(), ..explorer.figures })
}

impl Explorer {
    fn run(&mut self) -> Result<(), Violation> {
        while let Some((number, state)) = self.queue.pop_front() {
            let successors = catch_unwind(AssertUnwindSafe(|| state.successors()));
            let Ok(successors) = successors else {
                return Err(self.violation("the agent panics".to_owned(), number));
            };
            let is_settled = rules::unsettled(&state).is_none();
            self.figures.settled += usize::from(is_settled);
            let goes_on = successors.iter().any(|successor| successor.kind != Kind::Chance);
            if !goes_on && !is_settled {
                return Err(self.violation("the pod never settles".to_owned(), number));
            }
            for (index, successor) in successors.into_iter().enumerate() {
                self.found(number, index, successor, is_settled)?;
            }
        }
        Ok(())
    }

    fn found(&mut self, from: u32, index: usize, found: Successor, was_settled: bool) -> Result<(), Violation> {
        self.figures.transitions += 1;
        let digest = digest(&found.state);
        let next = u32::try_from(self.origins.len()).expect("fewer states than that fit into memory");
        let number = *self.known.entry(digest).or_insert(next);
        let is_certain = match found.kind {
            Kind::Progress => true,
            Kind::Audit => !was_settled,
            Kind::Chance => false,
        };
        if is_certain {
            self.edges.push((from, number));
        }
        if number != next {
            return Ok(());
        }
        let depth = self.origins[from as usize].depth + 1;
        self.figures.depth = self.figures.depth.max(depth);
        let index = u16::try_from(index).expect("a state has few successors");
        self.origins.push(Origin { from, number: index, depth });
        if let Some(rule) = rules::broken(&found.state) {
            return Err(self.violation(rule, number));
        }
        self.queue.push_back((number, found.state));
        Ok(())
    }

    /// Without further chances every path ends, in a settled state: there is no cycle.
    fn check_cycles(&self) -> Result<(), Violation> {
        let mut open = vec![0_u32; self.origins.len()];
        let mut before: Vec<Vec<u32>> = vec![Vec::new(); self.origins.len()];
        for (from, to) in &self.edges {
            open[*from as usize] += 1;
            before[*to as usize].push(*from);
        }
        let mut done: Vec<u32> = (0..).zip(&open).filter(|(_, open)| **open == 0).map(|(number, _)| number).collect();
        while let Some(number) = done.pop() {
            for from in &before[number as usize] {
                open[*from as usize] -= 1;
                if open[*from as usize] == 0 {
                    done.push(*from);
                }
            }
        }
        let Some(first) = (0..).zip(&open).find(|(_, open)| **open > 0).map(|(number, _)| number) else {
            return Ok(());
        };
        Err(self.cycle(first, &open))
    }

    /// The path to a cycle that this state leads to, and the cycle.
    fn cycle(&self, first: u32, open: &[u32]) -> Violation {
        let mut next: BTreeMap<u32, u32> = BTreeMap::new();
        for (from, to) in &self.edges {
            if open[*to as usize] > 0 {
                next.entry(*from).or_insert(*to);
            }
        }
        let mut walk = Vec::new();
        let mut at = first;
        let start = loop {
            if let Some(start) = walk.iter().position(|seen| *seen == at) {
                break start;
            }
            walk.push(at);
            at = next[&at];
        };
        let mut violation = self.violation("the pod never settles".to_owned(), walk[start]);
        let state = self.replay(&self.path(walk[start])).1;
        violation.path.push(format!("and then for ever ({} transitions):", walk.len() - start));
        violation.path.extend(self.labels(state, &walk[start..], at));
        violation
    }

    fn labels(&self, mut state: State, walk: &[u32], end: u32) -> Vec<String> {
        let targets = walk.iter().skip(1).copied().chain([end]);
        let mut labels = Vec::new();
        for target in targets {
            let step = state
                .successors()
                .into_iter()
                .find(|step| step.kind != Kind::Chance && self.known.get(&digest(&step.state)) == Some(&target));
            let Some(step) = step else { break };
            labels.push(step.label);
            state = step.state;
        }
        labels
    }

    fn path(&self, mut number: u32) -> Vec<u16> {
        let mut path = Vec::new();
        while number != 0 {
            let origin = self.origins[number as usize];
            path.push(origin.number);
            number = origin.from;
        }
        path.reverse();
        path
    }

    fn replay(&self, path: &[u16]) -> (Vec<String>, State) {
        let mut labels = Vec::new();
        let mut state = self.initial.clone();
        for number in path {
            let step = state.successors().swap_remove(usize::from(*number));
            labels.push(step.label);
            state = step.state;
        }
        (labels, state)
    }

    fn violation(&self, rule: String, number: u32) -> Violation {
        let (path, state) = self.replay(&self.path(number));
        let rule = match rules::unsettled(&state) {
            Some(why) if rule.contains("settles") => format!("{rule} ({why})"),
            Some(_) | None => rule,
        };
        Violation { rule, path }
    }
}
