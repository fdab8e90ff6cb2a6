use super::*;

fn link(index: u32, name: &str) -> Link {
    Link::ethernet(IfIndex::new(index), name)
}

#[test]
fn names_follow_the_devices() {
    let mut links = Links::default();
    let of = |links: &Links, name: &str| links.named(name).map(|link| link.ifindex.get());
    assert_eq!(links.insert(link(1, "a")), None);
    links.insert(link(2, "b"));
    assert_eq!((of(&links, "a"), of(&links, "b")), (Some(1), Some(2)));
    // A device is renamed, and another takes its name.
    assert_eq!(links.insert(link(1, "c")).unwrap().name, "a");
    assert_eq!((of(&links, "a"), of(&links, "c")), (None, Some(1)));
    links.insert(link(3, "a"));
    assert_eq!(links.remove(&IfIndex::new(1)).unwrap().name, "c");
    assert_eq!((of(&links, "a"), of(&links, "c")), (Some(3), None));

    // The notice of a name's new holder comes before the old one's end.
    links.insert(link(4, "b"));
    links.remove(&IfIndex::new(2));
    assert_eq!(of(&links, "b"), Some(4));
}

#[test]
fn differences_name_what_came_went_and_changed() {
    let (mut before, mut now) = (Links::default(), Links::default());
    for (links, all) in [
        (
            &mut before,
            [link(1, "same"), link(2, "old"), link(3, "gone")],
        ),
        (&mut now, [link(1, "same"), link(2, "new"), link(4, "come")]),
    ] {
        all.into_iter().for_each(|link| drop(links.insert(link)));
    }
    let mut names = BTreeSet::new();
    now.differences(&before, &mut names);
    assert_eq!(
        names,
        ["come", "gone", "new", "old"].map(String::from).into()
    );
}
