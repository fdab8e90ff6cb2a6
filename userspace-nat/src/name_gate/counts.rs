//! What was refused in a VM's DNS, for people.
use serde::{Deserialize, Serialize};

/// Rules by which questions were refused that are told apart, per VM.
const COUNTED_RULES: usize = 16;
/// As much of a refused name is kept, bytes.
const SHOWN_NAME: usize = 100;

/// What was refused in a VM's DNS, since the engine began.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NameCounts {
    /// Questions for names that may not be asked for.
    pub refused_names: u64,
    /// Questions for types that may not be asked for.
    pub refused_types: u64,
    /// Answers that led to a name that may not be asked for.
    pub refused_chains: u64,
    /// Answers with a protected address.
    pub rebinding: u64,
    /// Answers for which there was no room.
    pub full: u64,
    /// Questions for names of resolvers elsewhere.
    pub elsewhere: u64,
    /// Questions beyond the rate.
    pub over_rate: u64,
    /// Questions for new names beneath a wildcard, beyond what a VM may say by them.
    pub new_names: u64,
    /// Addresses open by name, now.
    pub open: u64,
    /// Connections and flows under inspect rules that were ended, by reason.
    #[serde(default)]
    pub inspected: slipgate_policy::RefusedCounts,
    /// Refused names by rule, with the last such name; of the first 16 rules.
    pub refused_by: Vec<RefusedQuestions>,
}

/// Questions that one rule refused.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RefusedQuestions {
    /// The rule as typed.
    pub rule: String,
    /// How many.
    pub questions: u64,
    /// The last one's name.
    pub last: String,
}

impl NameCounts {
    /// One more question was refused, by that rule.
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
