//! What rules say of names.
use slipgate_abi::Refusal;

use crate::{
    Action, Decision, Destination, Name, NamePattern, Place, Policy, Rule, compile::dns_bypass,
};

impl Policy {
    /// Whether questions are judged by their names: there is a rule by name, or the default is
    /// deny.
    pub fn judges_names(&self) -> bool {
        self.default == Action::Deny
            || !self.names.is_empty()
            || self.files_have_names
            || self.inspections.1
    }

    /// Places of what is said of a name (in lower case), ascending.
    pub fn about(&self, name: Name<'_>) -> Vec<Place> {
        let typed = self.names.matching(name).into_iter();
        let mut about: Vec<Place> = typed.map(|order| Place { order, line: 0 }).collect();
        if self.files_have_names {
            for &order in &self.files {
                if let Rule::DenyFile(file) = &self.rules[order as usize] {
                    let lines = file.lines_about(name).into_iter();
                    about.extend(lines.map(|line| Place { order, line }));
                }
            }
            about.sort_unstable();
        }
        about
    }

    /// What is said of names there.
    pub fn by_name(&self, place: Place) -> Option<(Action, &NamePattern)> {
        match &self.rules[place.order as usize] {
            Rule::Name(action, pattern) => Some((*action, pattern)),
            Rule::DenyFile(file) => Some((Action::Deny, file.name_at(place.line)?)),
            Rule::Match(..) => None,
        }
    }

    /// Whether a name with these rules is resolved: whether it may be connected to at all.
    pub fn resolves(&self, rules: &[Place]) -> Decision {
        let decides = |place: &&Place| {
            let said = self.by_name(**place);
            said.is_some_and(|(action, pattern)| action.admits() || pattern.is_whole())
        };
        let first = rules.iter().find(decides);
        first.map_or(self.by_default(), |place| self.decision_at(*place))
    }

    /// Whether a name, about which these rules are, may be asked for; `judges_names` says whether it
    /// is looked at at all.
    pub fn asks(&self, name: Name<'_>, rules: &[Place]) -> Decision {
        let decision = self.resolves(rules);
        let is_bypass = dns_bypass::is_resolver(name) || dns_bypass::is_canary(name);
        match decision.is_allowed() && is_bypass && !self.names_exactly(rules) {
            true => Decision {
                rule: self.dns_bypass_id(),
                line: None,
                refusal: Some(Refusal::DnsElsewhere),
            },
            false => decision,
        }
    }

    /// The same, also where no rule is by name.
    pub fn may_ask(&self, name: Name<'_>, rules: &[Place]) -> Decision {
        match self.judges_names() {
            true => self.asks(name, rules),
            false => Decision {
                rule: self.default_id(),
                line: None,
                refusal: None,
            },
        }
    }

    /// Judges a destination that was told for names, each by the rules about it: the decision, and
    /// the name that it is due to, if it is to one.
    pub fn decide_among<'r, T>(
        &self,
        to: Destination,
        names: impl Iterator<Item = (T, &'r [Place])>,
    ) -> (Decision, Option<T>) {
        let by_address = self.decide(to);
        let default = [self.default_id(), self.dns_bypass_id()];
        let by_rule = !default.contains(&by_address.rule);
        // What is denied by address or protected is out of reach of names.
        if by_rule && !by_address.is_allowed() {
            return (by_address, None);
        }
        let said = names.filter_map(|(name, rules)| Some((self.first_of(rules, to)?, name)));
        match said.min_by_key(|(decision, _)| (!decision.is_allowed(), decision.rule)) {
            Some((by_name, name)) if !by_rule || by_name.rule < by_address.rule => {
                (by_name, Some(name))
            }
            _ => (by_address, None),
        }
    }

    /// The first of these rules by name that speaks of a port and protocol. To a resolver elsewhere
    /// only those admit that mean it.
    pub fn first_of(&self, rules: &[Place], to: Destination) -> Option<Decision> {
        let bypass = self.bypasses_dns(to);
        let speaks = |place: &&Place| {
            self.by_name(**place).is_some_and(|(action, pattern)| {
                let counts = !(bypass && action.admits()) || dns_bypass::name_means(pattern);
                counts && pattern.covers(to.port, to.protocol)
            })
        };
        let first = rules.iter().find(speaks)?;
        Some(self.decision_at(*first))
    }

    /// Whether one of these rules by name gives that very name, and admits.
    pub fn names_exactly(&self, rules: &[Place]) -> bool {
        let is = |place: &Place| {
            let said = self.by_name(*place);
            said.is_some_and(|(action, pattern)| action.admits() && pattern.is_exact())
        };
        rules.iter().any(is)
    }

    /// How many octets of a name (in lower case) are beneath the narrowest wildcard that lets it be
    /// asked for; `None`: no wildcard does, or a rule gives the name itself.
    pub fn octets_beneath(&self, name: Name<'_>) -> Option<usize> {
        let about = self.about(name);
        let admitting = about.iter().filter_map(|place| self.by_name(*place));
        let patterns = || admitting.clone().filter(|(action, _)| action.admits());
        if patterns().any(|(_, pattern)| pattern.is_exact()) {
            return None;
        }
        let beneath = patterns().map(|(_, pattern)| name.0.len() - pattern.name().0.len());
        beneath.min()
    }

    fn decision_at(&self, place: Place) -> Decision {
        let line = (place.line > 0).then_some(place.line);
        self.decision(place.order, line, self.action(place.order))
    }

    /// Whether two lists of rules by name decide alike.
    pub fn same_effect(&self, a: &[Place], b: &[Place]) -> bool {
        let effect = |place: &Place| {
            let (action, pattern) = self.by_name(*place)?;
            let means = dns_bypass::name_means(pattern);
            Some((action, pattern.scope(), action.admits() && means))
        };
        a == b || a.iter().map(effect).eq(b.iter().map(effect))
    }

    /// Whether this is a rule that denies.
    pub fn is_deny(&self, order: u32) -> bool {
        self.action(order) == Action::Deny
    }
}
