//! A policy file: parsed, compiled, and used for a decision.
//!
//! Input: `destination (see [`Tape::destination`]) | deny file, with its length | policy file`.
use std::{io, path::Path};

use slipgate_abi::VmId;
use slipgate_policy::{
    Name, PolicySet,
    document::{CliOverrides, LoadedPolicies, PolicyFile, check_file, policy_in_file},
    wire,
};
use userspace_nat::name_gate::Judge;

use crate::tape::Tape;

/// Names for which decisions are made.
const NAMES: [&str; 3] = ["example.com", "api.example.com", "a.b.evil.test"];

/// Reads the file as `slipgate policy check` does, and makes decisions by it.
pub fn policy(input: &[u8]) {
    let mut tape = Tape::new(input);
    let to = tape.destination();
    let list = String::from_utf8_lossy(tape.bytes()).into_owned();
    let text = String::from_utf8_lossy(tape.rest()).into_owned();
    let read = |path: &Path| match path.ends_with("list.txt") {
        true => Ok(list.clone()),
        false => Err(io::ErrorKind::NotFound.into()),
    };
    let file = match PolicyFile::parse(Path::new("p/policy.toml"), text) {
        Ok(file) => file,
        Err(error) => return assert!(error.to_string().starts_with("p/policy.toml:")),
    };
    let _ = check_file(&file).map_err(|error| error.to_string());
    let loaded = match LoadedPolicies::of(&CliOverrides::default(), Some(&file), &read) {
        Ok(loaded) => loaded,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let policies = match loaded.compile() {
        Ok(policies) => policies,
        // More rules than there is room for.
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    assert!(policies.doubles().is_none());
    // What the engine is sent.
    let sent = PolicySet::from_bytes(&policies.to_bytes());
    assert_eq!(sent.expect("what was compiled"), policies);

    let texts: Vec<String> = policies.texts().collect();
    let mut judge = Judge::new(policies.clone());
    for (policy, index) in policies.iter().zip(0..) {
        judge.assign(VmId::new(index), index);
        let decision = judge.decide(VmId::new(index), to, 0).decision;
        assert!(policy.has(decision.rule));
        assert_eq!(decision, policy.decide(to));
        let text = &texts[decision.rule.0 as usize];
        assert!(policies.text(decision).starts_with(&text[..]));
        assert!(!policy.explain(to).to_string().is_empty());
        for rule in policy.standing() {
            let covered = policy.covered_by(rule).is_some();
            // What an earlier rule matches whole never decides.
            assert!(!covered || rule.id != decision.rule);
        }
        for name in NAMES {
            let wire = wire(name).expect("a name");
            let told = policy.decide_as(to, Name(&wire));
            assert!(policy.has(told.rule));
            let (_, said) = policy.explain_name(Name(&wire), Some((to.port, to.protocol)));
            assert!(!said.is_empty());
        }
    }
    let _ = policy_in_file(&file, "a", None);
}
