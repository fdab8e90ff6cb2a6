use super::*;

fn named(all: &[(&str, &str)]) -> BTreeMap<String, String> {
    let all = all.iter();
    all.map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
        .collect()
}

const CLOSED: &str =
    "default = \"deny\"\nrules = [{ allow = \"example.com:443\" }, { deny = \"192.0.2.0/24\" }]\n";

#[test]
fn a_policy_joins_those_of_the_file_or_replaces_one() {
    let text =
        "default = \"allow\"\n[policy.a]\ndefault = \"allow\"\n[policy.b]\ndefault = \"allow\"\n";
    let file = PolicyFile::parse(Path::new("p.toml"), text.to_owned()).unwrap();
    let file = with_named(Some(file), &named(&[("a", CLOSED), ("c", CLOSED)]))
        .unwrap()
        .unwrap();
    let names: Vec<&str> = file
        .document
        .policy
        .keys()
        .map(|name| &**name.get_ref())
        .collect();
    assert_eq!(names, ["a", "b", "c"]);
    for (name, policy) in &file.document.policy {
        let rules = if name.get_ref() == "b" { 0 } else { 2 };
        assert_eq!(policy.rules.len(), rules, "{name:?}");
    }
    // Once more changes nothing.
    let again = with_named(Some(file.clone()), &named(&[("a", CLOSED), ("c", CLOSED)])).unwrap();
    assert_eq!(again.unwrap().document, file.document);
}

#[test]
fn without_a_file_vms_that_name_no_policy_are_as_before() {
    let file = with_named(None, &named(&[("a", CLOSED)])).unwrap().unwrap();
    assert!(file.document.default.is_some());
    assert!(with_named(None, &named(&[])).unwrap().is_none());
}

#[test]
fn what_is_no_policy_is_refused_with_its_line() {
    check_named("a", CLOSED).unwrap();
    for (name, text, part) in [
        ("a/b", CLOSED, "can't be a name"),
        ("a", "default = \"deny\"\ncolour = 1\n", "a:2"),
        ("a", "default = ", "a:1"),
        ("a", "default = \"deny\"\n[vms]\nx = \"a\"\n", "vms"),
        (
            "a",
            "default = \"deny\"\nrules = [{ deny_file = \"/etc/shadow\" }]\n",
            "deny_file",
        ),
    ] {
        let error = check_named(name, text).unwrap_err().to_string();
        assert!(error.contains(part), "{text:?}: {error}");
    }
}
