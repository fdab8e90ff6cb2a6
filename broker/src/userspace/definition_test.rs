use super::*;

#[test]
fn what_the_command_line_alone_decides_is_named() {
    let now = VmDefinition {
        forwards: vec!["tcp:8080:80".into()],
        ..VmDefinition::new("vm", "")
    };
    let changeable = VmDefinition {
        policy: Some("closed".into()),
        host_loopback: vec!["80/tcp".into()],
        labels: [("a".to_owned(), "b".to_owned())].into(),
        ..now.clone()
    };
    assert_eq!(other_field(&now, &changeable), None);
    let without = VmDefinition::new("vm", "");
    assert_eq!(other_field(&now, &without), Some("forwards"));
    let on_tap = VmDefinition {
        tap: "tap0".into(),
        ..now.clone()
    };
    assert_eq!(other_field(&now, &on_tap), Some("tap"));
}
