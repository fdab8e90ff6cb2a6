//! Explanation of port 53, which slipgate's own resolver answers at every address.
use super::offline::Standing;
use crate::{Action, Policy, Rule};

impl Policy {
    /// Returns why no name at all is resolved: the setting or rule as it is shown, and a sentence.
    /// `None` if some name may be.
    pub fn resolves_nothing(&self) -> Option<(String, &'static str)> {
        if let Some(text) = self.without_dns() {
            return Some((text, "No resolver is asked."));
        }
        let shut = self.default_action() == Action::Deny;
        let opens = |standing: Standing<'_>| match standing.rule {
            Rule::Name(action, _) => action.admits() && !self.is_hidden(standing),
            Rule::Match(..) | Rule::DenyFile(_) => false,
        };
        let nothing = shut && !self.standing().any(opens);
        nothing.then(|| {
            let text = self.text(self.by_default());
            (text, "No rule allows a name, and the default is deny.")
        })
    }

    /// Whether an earlier rule denies, on all ports and protocols, every name that this rule
    /// matches.
    fn is_hidden(&self, later: Standing<'_>) -> bool {
        let Rule::Name(_, pattern) = later.rule else {
            return false;
        };
        let mut earlier = self.standing().take_while(|s| s.id < later.id);
        earlier.any(|s| match s.rule {
            Rule::Name(Action::Deny, deny) => deny.is_whole() && deny.contains(pattern),
            Rule::DenyFile(file) => file
                .names_about(pattern.name())
                .any(|deny| deny.is_whole() && deny.contains(pattern)),
            Rule::Name(..) | Rule::Match(..) => false,
        })
    }

    /// Explains port 53 of any address in sentences, one per line. Returns also whether any name is
    /// answered.
    pub fn explain_port_53(&self) -> (bool, String) {
        let mut text =
            "Port 53 of every address is answered by slipgate's own resolver; no rule by \
                        address is tried."
                .to_owned();
        let nothing = self.resolves_nothing();
        if let Some((by, why)) = &nothing {
            text.push_str(&format!(
                "\nIt answers REFUSED, whatever is asked, by {by}. {why}"
            ));
        }
        (nothing.is_none(), text)
    }
}

#[cfg(test)]
#[path = "port_53_test.rs"]
mod tests;
