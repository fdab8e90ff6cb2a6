use proptest::prelude::*;
use slipgate_abi::Refusal;

use super::*;
use crate::{
    DenyFile,
    strategies::{NAMES, destination, pattern, policy, policy_of},
    wire,
};

/// Addresses of resolvers, adjacent ones and others, and of their surroundings.
const CROWDED: [&str; 12] = [
    "0.0.0.0/0",
    "0.0.0.0/1",
    "128.0.0.0/1",
    "208.67.222.0/24",
    "208.67.222.220/30",
    "208.67.222.220/31",
    "208.67.222.220",
    "208.67.222.221",
    "208.67.222.222/31",
    "208.67.222.222",
    "208.67.222.223",
    "10.0.0.0/8",
];

/// Few prefixes that contain each other often, and names, one of which is a resolver's.
fn crowded_rule() -> impl Strategy<Value = Rule> {
    let action = prop::sample::select(&[Action::Allow, Action::Deny, Action::Inspect][..]);
    let scope = prop::sample::select(&["", "", "", ":443", ":853", ":853/tcp"][..]);
    let prefix = prop::sample::select(&CROWDED[..]);
    let name = prop::sample::select(&["dns.google", "*.google", "a.test"][..]);
    let what = prop_oneof![2 => prefix.clone(), 1 => name];
    let typed = (action, what, scope);
    let file = prop::collection::vec(prefix, 1..5);
    prop_oneof![
        4 => typed.prop_map(|(action, what, scope)| {
            Rule::parse(action, &format!("{what}{scope}")).unwrap()
        }),
        1 => file.prop_map(|lines| {
            Rule::DenyFile(Box::new(DenyFile::parse("list", &lines.join("\n")).unwrap()))
        }),
    ]
}

fn crowded_to() -> impl Strategy<Value = Destination> {
    let addr = prop::sample::select(
        &[
            [208, 67, 222, 219],
            [208, 67, 222, 220],
            [208, 67, 222, 221],
            [208, 67, 222, 222],
            [208, 67, 222, 223],
            [1, 1, 1, 1],
            [10, 0, 0, 1],
            [203, 0, 113, 1],
        ][..],
    );
    let port = prop::sample::select(&[443, 853, 80][..]);
    let protocol = prop::sample::select(&[Protocol::Tcp, Protocol::Udp][..]);
    (addr, port, protocol).prop_map(|(addr, port, protocol)| Destination {
        addr: addr.into(),
        port,
        protocol,
    })
}

/// Destinations, mostly at ports and addresses that rules concern.
fn to() -> impl Strategy<Value = Destination> {
    let special = prop::sample::select(&[443, 853][..]);
    let addr = prop_oneof![
        6 => Just(None),
        1 => Just(Some(IpAddr::from([1, 1, 1, 1]))),
    ];
    (destination(), prop::option::of(special), addr).prop_map(|(to, port, addr)| Destination {
        port: port
            .filter(|_| to.protocol != Protocol::Icmp)
            .unwrap_or(to.port),
        addr: addr.unwrap_or(to.addr),
        ..to
    })
}

/// Returns the decision when the guest has asked for the name and got that address; and whether the
/// question is allowed. A test of the engine's name gate shows that it decides alike.
fn judged(policy: &Policy, name: &'static str, to: Destination) -> (Decision, bool) {
    let asked = wire(name).unwrap();
    let passes = policy.question(Name(&asked)).is_allowed();
    (policy.decide_as(to, Name(&asked)), passes)
}

/// Returns the outcome that a text gives for an address.
fn told(passes: bool, text: &str, addr: IpAddr) -> Outcome {
    let is = |outcome: Outcome, sentence: &str| sentence.contains(outcome.describe());
    let all = [Outcome::Admitted, Outcome::Inspected, Outcome::Refused];
    let of = |sentence: &str| all.into_iter().find(|o| is(*o, sentence));
    let mut narrowest = None;
    for sentence in text.lines() {
        let Some(rest) = sentence.strip_prefix("Where its address is in ") else {
            continue;
        };
        let (prefix, rest) = rest.split_once(',').unwrap();
        let prefix: IpNet = prefix.parse().unwrap();
        let longer = narrowest.is_none_or(|(len, _)| prefix.prefix_len() > len);
        if prefix.contains(&addr) && longer {
            narrowest = Some((prefix.prefix_len(), of(rest).unwrap()));
        }
    }
    // An address that a rule gives has a sentence of its own.
    if resolvers().any(|one| one == addr)
        && narrowest.is_none_or(|(len, _)| len < IpNet::from(addr).prefix_len())
    {
        let mut sentences = text.lines();
        let resolvers =
            sentences.find(|s| s.starts_with("Where its address is a public resolver's"));
        narrowest = resolvers.map(|s| (128, of(s).unwrap())).or(narrowest);
    }
    let inspected = text.lines().any(|sentence| {
        sentence.starts_with("Inspected:")
            || (!sentence.starts_with("Where") && is(Outcome::Inspected, sentence))
    });
    match (narrowest, passes) {
        (Some((_, outcome)), _) => outcome,
        (None, false) => Outcome::Refused,
        (None, true) if inspected => Outcome::Inspected,
        (None, true) => Outcome::Admitted,
    }
}

/// Compares the explanation of a name, for one of its addresses, with the decision.
fn is_told_what_is_decided(
    policy: &Policy,
    name: &'static str,
    to: Destination,
) -> Result<(), TestCaseError> {
    let asked = wire(name).unwrap();
    let port = Some((to.port, to.protocol));
    let (passes, text) = policy.explain_name(Name(&asked), port);
    let (decision, is_resolved) = judged(policy, name, to);
    prop_assert_eq!(text.contains("is not resolved"), !is_resolved, "{}", &text);
    if !is_resolved {
        prop_assert!(!passes);
        return Ok(());
    }
    let does = policy.outcome(decision);
    prop_assert_eq!(does == Outcome::Inspected, policy.inspects(decision.rule));
    // What is told of an address inside another holds for both.
    let to = policy.judged_as(to);
    let told = told(passes, &text, to.addr);
    let shut = text
        .lines()
        .find(|line| line.ends_with("shut all the same."));
    let is_resolver = policy.bypasses_dns(to) && is_by_address(to);
    // A sentence says that resolvers stay refused, except those that a rule by address denies.
    let is_said = |line: &str| {
        let is_denied = policy.decide(to).refusal == Some(Refusal::Rule);
        !is_resolver || is_denied || line.contains("public resolvers")
    };
    let is_all_the_same = does == Outcome::Refused && shut.is_some_and(is_said);
    // Protected space, and resolvers elsewhere, where there is no rule by address.
    let special = shut.is_none() && ranges_of_nobody().any(|range| range.contains(&to.addr));
    prop_assert!(
        told == does || is_all_the_same || (special && does == Outcome::Refused),
        "{} to {:?} is told to be {:?}, and is {:?}:\n{}",
        name,
        to,
        told,
        does,
        text
    );
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn what_is_told_of_a_name_is_what_is_decided(
        policy in policy(), name in prop::sample::select(&NAMES[..]), to in to(),
    ) {
        prop_assume!(to.port != DNS_PORT);
        is_told_what_is_decided(&policy, name, to)?;
    }

    #[test]
    fn what_is_told_of_resolvers_and_of_ranges_in_pieces_is_what_is_decided(
        policy in policy_of(crowded_rule()),
        name in prop::sample::select(&["dns.google", "a.test"][..]),
        to in crowded_to(),
    ) {
        is_told_what_is_decided(&policy, name, to)?;
    }

    #[test]
    fn each_range_has_an_address_that_no_narrower_one_has(
        prefixes in prop::collection::vec((pattern().prop_map(|p| p.prefix()), any::<bool>()), 0..20),
        addr in destination().prop_map(|to| to.addr),
    ) {
        let ranges = cut(prefixes.clone());
        prop_assert_eq!(ranges[0].prefix, IpNet::from(Ipv4Net::default()));
        let narrowest = |addr: IpAddr| {
            let around = ranges.iter().filter(|range| range.prefix.contains(&addr));
            around.max_by_key(|range| range.prefix.prefix_len()).unwrap()
        };
        // Whatever address is its range's, that range has one.
        prop_assert!(narrowest(addr).address.is_some());
        for range in &ranges {
            let of_rules = prefixes.iter().any(|(p, rules)| *rules && *p == range.prefix);
            let is_all_ipv6 = range.prefix == IpNet::from(Ipv6Net::default());
            prop_assert_eq!(range.is_rules, of_rules || is_all_ipv6);
            prop_assert!(is_all_ipv6 || ranges[range.parent].prefix.contains(&range.prefix));
            if let Some(addr) = range.address {
                prop_assert_eq!(narrowest(addr), range);
            }
        }
    }
}

fn ranges_of_nobody() -> impl Iterator<Item = IpNet> {
    let protected = everywhere().map(|(range, _)| range);
    protected.chain(resolvers().map(IpNet::from))
}

#[test]
fn what_stands_before_a_deny_of_all_is_not_said_to_be_denied() {
    let rules = [
        (Action::Allow, "203.0.113.0/24"),
        (Action::Inspect, "a.test:443"),
        (Action::Deny, "0.0.0.0/0:443"),
    ];
    let rules = rules.map(|(action, text)| Rule::parse(action, text).unwrap());
    let policy = Policy::new(Action::Deny, rules.to_vec());
    let asked = wire("a.test").unwrap();
    let (passes, text) = policy.explain_name(Name(&asked), Some((443, Protocol::Tcp)));
    assert!(!passes);
    assert!(!text.contains("whatever"), "{text}");
    let expected = "Where its address is in 203.0.113.0/24, it is admitted and not inspected by \
                    rule 1, `--allow 203.0.113.0/24`.";
    assert!(text.lines().any(|line| line == expected), "{text}");
}

/// Returns the explanation of TCP port 443.
fn told_of_443(default: Action, rules: Vec<Rule>, name: &str) -> String {
    let asked = wire(name).unwrap();
    let policy = Policy::new(default, rules);
    let (_, text) = policy.explain_name(Name(&asked), Some((443, Protocol::Tcp)));
    text
}

#[test]
fn resolvers_that_a_rule_by_name_means_are_told_of_within_a_broad_rule() {
    let rules = [
        (Action::Allow, "0.0.0.0/1"),
        (Action::Allow, "9.9.9.9:443"),
        (Action::Inspect, "dns.google"),
    ];
    let rules = rules.map(|(action, text)| Rule::parse(action, text).unwrap());
    let text = told_of_443(Action::Allow, rules.to_vec(), "dns.google");
    for expected in [
        "Where its address is in 0.0.0.0/1, it is admitted and not inspected by rule 1, \
         `--allow 0.0.0.0/1`.",
        "Where its address is in 9.9.9.9/32, it is admitted and not inspected by rule 2, \
         `--allow 9.9.9.9:443`.",
        "Where its address is a public resolver's, it is admitted and inspected by rule 3, \
         `--inspect dns.google`.",
    ] {
        assert!(text.lines().any(|line| line == expected), "{text}");
    }
}

#[test]
fn a_rule_is_told_of_though_later_lines_of_a_deny_file_have_all_of_its_addresses() {
    let inspect = |text| Rule::parse(Action::Inspect, text).unwrap();
    let file = |lines| Rule::DenyFile(Box::new(DenyFile::parse("list", lines).unwrap()));
    let rules = vec![
        inspect("198.51.100.0/31"),
        file("198.51.100.0/32\n198.51.100.1/32"),
    ];
    let text = told_of_443(Action::Allow, rules, "a.test");
    let expected = "Where its address is in 198.51.100.0/31, it is admitted and inspected by rule \
                    1, `--inspect 198.51.100.0/31`.";
    assert!(text.lines().any(|line| line == expected), "{text}");

    let rules = vec![
        inspect("0.0.0.0/0"),
        inspect("::/0"),
        file("0.0.0.0/1\n128.0.0.0/1"),
    ];
    let text = told_of_443(Action::Allow, rules, "a.test");
    let expected = "TCP port 443 of it is admitted and inspected whatever address it has, by rule \
                    1, `--inspect 0.0.0.0/0`, and no rule by name speaks of it.";
    assert!(text.lines().any(|line| line == expected), "{text}");
}

#[test]
fn that_resolvers_stay_shut_is_said_unless_a_rule_opens_them() {
    let texts = [
        (Action::Allow, "a.test"),
        (Action::Allow, "dns.google:443"),
        (Action::Deny, "203.0.113.0/24"),
        (Action::Allow, "9.9.9.9:443"),
    ];
    let rules = texts.map(|(action, text)| Rule::parse(action, text).unwrap());
    let text = told_of_443(Action::Deny, rules.to_vec(), "a.test");
    let expected = "\
a.test is resolved, by rule 1, `--allow a.test`.
TCP port 443 of what DNS tells for it is opened by rule 1, `--allow a.test`.
Where its address is in 9.9.9.9/32, it is admitted and not inspected by rule 4, `--allow 9.9.9.9:443`.
What a rule by address denies, protected space and public resolvers stay shut all the same.";
    assert_eq!(text, expected);

    let text = told_of_443(Action::Deny, rules.to_vec(), "dns.google");
    let expected = "\
dns.google is resolved, by rule 2, `--allow dns.google:443`.
TCP port 443 of what DNS tells for it is opened by rule 2, `--allow dns.google:443`.
What a rule by address denies, and protected space, stays shut all the same.";
    assert_eq!(text, expected);
}
