//! Queries about a policy without a running engine, for people who write policies. They walk all
//! rules; nothing here is on the path of a flow.
use crate::{
    Action, Decision, Destination, Name, NamePattern, Pattern, PatternRef, Policy, Rule, RuleId,
    compile::protected::everywhere,
};

/// A rule with its number in a policy.
#[derive(Clone, Copy, Debug)]
pub struct Standing<'p> {
    /// Number of the rule.
    pub id: RuleId,
    /// The rule itself, by reference.
    pub rule: &'p Rule,
}

impl Policy {
    /// Returns the rules with their numbers, in order.
    pub fn standing(&self) -> impl Iterator<Item = Standing<'_>> {
        let standing = |(place, rule)| Standing {
            id: self.id(place),
            rule,
        };
        (0..).zip(&self.rules).map(standing)
    }

    /// Returns a rule's name in a sentence, as [`Policy::named`] does.
    pub fn describe(&self, rule: RuleId) -> String {
        self.named(Decision::by(rule, None))
    }

    /// Returns every rule by address that matches a destination, in order. The first is not always
    /// the one that decides: only specific rules open protected space.
    pub fn matching(&self, to: Destination) -> Vec<RuleId> {
        let all = || std::iter::once(to).chain(to.inside());
        let matches = |rule: &Rule| match rule {
            Rule::Match(_, pattern) => all().any(|to| pattern.matches(to)),
            Rule::DenyFile(file) => all().any(|to| file.line_for(to).is_some()),
            Rule::Name(..) => false,
        };
        let standing = self.standing().filter(|standing| matches(standing.rule));
        standing.map(|standing| standing.id).collect()
    }

    /// Returns the rules about a name (in lower case, wire form), in order, whatever their ports.
    pub fn speaking_of(&self, name: Name<'_>) -> Vec<RuleId> {
        let mut about: Vec<u32> = self.about(name).iter().map(|place| place.order).collect();
        about.dedup();
        about.into_iter().map(|place| self.id(place)).collect()
    }

    /// Decides whether a name may be asked for.
    pub fn question(&self, name: Name<'_>) -> Decision {
        self.may_ask(name, &self.about(name))
    }

    /// Decides on a destination as if DNS had just returned it for `name`: the decision after the
    /// guest has asked.
    pub fn decide_as(&self, to: Destination, name: Name<'_>) -> Decision {
        let about = self.about(name);
        self.decide_given(to, name, &about).0
    }

    /// Decides as [`Policy::decide_as`] does, given the rules about the name. Returns also whether
    /// the name made the decision.
    pub(super) fn decide_given(
        &self,
        to: Destination,
        name: Name<'_>,
        about: &[PatternRef],
    ) -> (Decision, bool) {
        let is_told = self.without_dns().is_none() && self.may_ask(name, about).is_allowed();
        let names = is_told.then_some(((), about));
        let (decision, by_name) = self.decide_among(to, names.into_iter());
        (decision, by_name.is_some())
    }

    /// Returns the first earlier rule by address that admits without inspection some of the flows
    /// that an inspect rule about a name would inspect.
    pub fn uninspected_by(&self, later: Standing<'_>) -> Option<RuleId> {
        let Rule::Name(Action::Inspect, name) = later.rule else {
            return None;
        };
        let mut earlier = self.standing().take_while(|s| s.id < later.id);
        earlier.find_map(|s| match s.rule {
            Rule::Match(Action::Allow, pattern) => {
                pattern.scope().overlaps(name.scope()).then_some(s.id)
            }
            _ => None,
        })
    }

    /// Returns the first earlier rule that matches everything this rule matches, so that this rule
    /// never decides; `None` if there is none.
    pub fn covered_by(&self, later: Standing<'_>) -> Option<RuleId> {
        let mut earlier = self.standing().take_while(|s| s.id < later.id);
        earlier.find_map(|s| covers(s.rule, later.rule).then_some(s.id))
    }
}

/// Whether the earlier rule leaves nothing for the later one to decide.
fn covers(earlier: &Rule, later: &Rule) -> bool {
    match (earlier, later) {
        (Rule::Match(action, a), Rule::Match(later, b)) => {
            a.contains(b) && (*action == Action::Deny || !speaks_where_not(a, *later, b))
        }
        (Rule::DenyFile(file), Rule::Match(_, b)) => file.patterns().any(|a| a.contains(b)),
        (Rule::Name(_, a), Rule::Name(_, b)) => a.contains(b),
        (Rule::DenyFile(file), Rule::Name(_, b)) => {
            file.names_about(b.name()).any(|a| a.contains(b))
        }
        _ => false,
    }
}

/// Whether a later rule for `b`, within `a`, decides on some protected space that an admitting rule
/// for `a` is too broad to open.
fn speaks_where_not(a: &Pattern, later: Action, b: &Pattern) -> bool {
    let (a, b) = (a.prefix(), b.prefix());
    everywhere().any(|(range, _)| {
        let overlaps = range.contains(&b) || b.contains(&range);
        let opens = range.prefix_len() <= b.prefix_len();
        overlaps && range.prefix_len() > a.prefix_len() && (later == Action::Deny || opens)
    })
}

impl Pattern {
    /// Whether this pattern matches everything that `other` matches.
    pub fn contains(&self, other: &Self) -> bool {
        self.prefix().contains(&other.prefix()) && self.scope().contains(other.scope())
    }
}

impl NamePattern {
    /// Whether this pattern matches everything that `other` matches.
    pub fn contains(&self, other: &Self) -> bool {
        let (a, b) = (self.name().0, other.name().0);
        let names = match (self.is_exact(), other.is_exact()) {
            (true, true) => a == b,
            (true, false) => false,
            // Label by label: a tail of bytes may begin within a label.
            (false, true) => parents(b).any(|parent| parent == a),
            (false, false) => a == b || parents(b).any(|parent| parent == a),
        };
        names && self.scope().contains(other.scope())
    }

    /// Whether both patterns match the same names.
    pub fn is_about_same(&self, other: &Self) -> bool {
        (self.name().0, self.is_exact()) == (other.name().0, other.is_exact())
    }
}

/// Returns the parents of a name in wire form, the longest first.
fn parents(name: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::successors(parent(name), |name| parent(name))
}

fn parent(name: &[u8]) -> Option<&[u8]> {
    let length = usize::from(*name.first()?);
    name.get(1 + length..).filter(|rest| !rest.is_empty())
}

#[cfg(test)]
#[path = "offline_test.rs"]
mod tests;
