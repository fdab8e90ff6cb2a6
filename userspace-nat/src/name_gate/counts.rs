//! Counts of refusals in a VM's DNS, for people.
use serde::{Deserialize, Serialize};

/// Most rules per VM for which refused questions are counted separately.
const COUNTED_RULES: usize = 16;
/// Longest part of a refused name that is kept, bytes.
const SHOWN_NAME: usize = 100;

/// Refusals in a VM's DNS since the engine started.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NameCounts {
    /// Questions for names that may not be asked for.
    pub refused_names: u64,
    /// Questions for types that may not be asked for.
    pub refused_types: u64,
    /// Answers that led to a name that may not be asked for.
    pub refused_chains: u64,
    /// Answers with a protected address ("rebinding").
    pub rebinding: u64,
    /// Answers for which there was no room.
    pub full: u64,
    /// Questions for names of public resolvers.
    pub elsewhere: u64,
    /// Questions beyond the rate limit.
    pub over_rate: u64,
    /// Questions for new names beneath a wildcard, beyond the limit of new names.
    pub new_names: u64,
    /// Addresses that are open by name now.
    pub open: u64,
    /// Connections and flows under inspect rules that were ended, by reason.
    #[serde(default)]
    pub inspected: slipgate_policy::RefusedCounts,
    /// Refused names by rule, with the last such name, for the first 16 rules.
    pub refused_by: Vec<RefusedQuestions>,
}

/// Questions that one rule refused.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RefusedQuestions {
    /// Text of the rule.
    pub rule: String,
    /// Number of questions that it refused.
    pub questions: u64,
    /// Name in the last question.
    pub last: String,
}

impl NameCounts {
    /// Counts a question that a rule refused.
    pub(super) fn refused(&mut self, rule: String, mut name: String) {
        name.truncate(SHOWN_NAME); // ASCII, as names are shown

        self.refused_names += 1;
        if let Some(by) = self.refused_by.iter_mut().find(|by| by.rule == rule) {
            by.questions += 1;
            by.last = name;
        } else if self.refused_by.len() < COUNTED_RULES {
            self.refused_by.push(RefusedQuestions {
                rule,
                questions: 1,
                last: name,
            });
        }
    }
}
