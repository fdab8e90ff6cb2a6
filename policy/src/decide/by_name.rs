//! Decisions by the rules about names.
use super::exfil_budget::Chosen;
use crate::{
    Action, Decision, Destination, Name, NamePattern, PatternRef, Policy, Rule, compile::dns_bypass,
};

impl Policy {
    /// Whether questions are judged by their names: some rule is by name or inspects by address, or
    /// the default is deny.
    pub fn judges_names(&self) -> bool {
        self.default == Action::Deny
            || !self.names.is_empty()
            || self.files_have_names
            || self.inspections.1
    }

    /// Returns the places of all patterns about a name (in lower case), ascending.
    pub fn about(&self, name: Name<'_>) -> Vec<PatternRef> {
        let typed = self.names.matching(name).into_iter();
        let mut about: Vec<PatternRef> = typed.map(|order| PatternRef { order, line: 0 }).collect();
        if self.files_have_names {
            for &order in &self.files {
                if let Rule::DenyFile(file) = &self.rules[order as usize] {
                    let lines = file.lines_about(name).into_iter();
                    about.extend(lines.map(|line| PatternRef { order, line }));
                }
            }
            about.sort_unstable();
        }
        about
    }

    /// Returns the action and the pattern by name at a place; `None` if there is none.
    pub fn by_name(&self, place: PatternRef) -> Option<(Action, &NamePattern)> {
        match &self.rules[place.order as usize] {
            Rule::Name(action, pattern) => Some((*action, pattern)),
            Rule::DenyFile(file) => Some((Action::Deny, file.name_at(place.line)?)),
            Rule::Match(..) => None,
        }
    }

    /// Decides whether a name is resolved, given the rules about it: whether a connection to it may
    /// be allowed at all.
    pub fn resolves(&self, rules: &[PatternRef]) -> Decision {
        let decides = |place: &&PatternRef| {
            let said = self.by_name(**place);
            said.is_some_and(|(action, pattern)| action.admits() || pattern.is_whole())
        };
        let first = rules.iter().find(decides);
        first.map_or(self.by_default(), |place| self.decision_at(*place))
    }

    /// Decides whether a name may be asked for, given the rules about it. The result applies only
    /// where `judges_names` is true.
    pub fn asks(&self, name: Name<'_>, rules: &[PatternRef]) -> Decision {
        let decision = self.resolves(rules);
        let is_bypass = dns_bypass::is_resolver(name) || dns_bypass::is_canary(name);
        match decision.is_allowed() && is_bypass && !self.names_exactly(rules) {
            true => self.by_dns_bypass(),
            false => decision,
        }
    }

    /// Decides whether a name may be asked for, given the rules about it. Where questions are not
    /// judged by their names, every name may.
    pub fn may_ask(&self, name: Name<'_>, rules: &[PatternRef]) -> Decision {
        match self.judges_names() {
            true => self.asks(name, rules),
            false => Decision::by(self.default_id(), None),
        }
    }

    /// Decides on a destination that DNS answers gave for names, each with the rules about it.
    /// Returns the decision, and the name that made it, if one did.
    pub fn decide_among<'r, T>(
        &self,
        to: Destination,
        names: impl Iterator<Item = (T, &'r [PatternRef])>,
    ) -> (Decision, Option<T>) {
        let by_address = self.decide(to);
        let default = [self.default_id(), self.dns_bypass_id()];
        let by_rule = !default.contains(&by_address.rule);
        // Names cannot open a destination that is denied by address or protected.
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

    /// Returns the decision of the first of these rules by name that matches a port and protocol;
    /// `None` if none does. A resolver that bypasses the rules by name is opened by specific rules
    /// only.
    pub fn first_of(&self, rules: &[PatternRef], to: Destination) -> Option<Decision> {
        let bypass = self.bypasses_dns(to);
        let speaks = |place: &&PatternRef| {
            self.by_name(**place).is_some_and(|(action, pattern)| {
                let counts = !(bypass && action.admits()) || dns_bypass::name_means(pattern);
                counts && pattern.covers(to.port, to.protocol)
            })
        };
        let first = rules.iter().find(speaks)?;
        Some(self.decision_at(*first))
    }

    /// Whether one of these rules admits and gives the name itself rather than a wildcard.
    pub fn names_exactly(&self, rules: &[PatternRef]) -> bool {
        let is = |place: &PatternRef| {
            let said = self.by_name(*place);
            said.is_some_and(|(action, pattern)| action.admits() && pattern.is_exact())
        };
        rules.iter().any(is)
    }

    /// Returns the part of a name (in lower case) that a guest which may ask for it chose: its
    /// octets beneath the narrowest wildcard that admits it, unless a rule gives the name itself.
    /// `None`: nothing limits the choice, for the default admits the name.
    pub fn chosen(&self, name: Name<'_>) -> Option<Chosen> {
        let about = self.about(name);
        let admitting = about.iter().filter_map(|place| self.by_name(*place));
        let patterns = || admitting.clone().filter(|(action, _)| action.admits());
        if patterns().any(|(_, pattern)| pattern.is_exact()) {
            return (self.default == Action::Deny).then_some(Chosen::Listed);
        }
        let beneath = patterns().map(|(_, pattern)| name.0.len() - pattern.name().0.len());
        beneath.min().map(Chosen::Beneath)
    }

    fn decision_at(&self, place: PatternRef) -> Decision {
        let line = (place.line > 0).then_some(place.line);
        self.decision(place.order, line, self.action(place.order))
    }

    /// Whether two lists of rules by name have the same effect. A rule that denies has another
    /// effect before a rule by address that admits than behind it ([`Policy::decide_among`]).
    pub fn same_effect(&self, a: &[PatternRef], b: &[PatternRef]) -> bool {
        let admits_before = |order: u32| self.address_admits.partition_point(|at| *at < order);
        let effect = |place: &PatternRef| {
            let (action, pattern) = self.by_name(*place)?;
            let means = dns_bypass::name_means(pattern);
            let behind = (!action.admits()).then(|| admits_before(place.order));
            Some((action, pattern.scope(), action.admits() && means, behind))
        };
        a == b || a.iter().map(effect).eq(b.iter().map(effect))
    }

    /// Whether the rule at a position denies.
    pub fn is_deny(&self, order: u32) -> bool {
        self.action(order) == Action::Deny
    }
}
