use super::*;

const MAP: &str =
    "#[btf_map]\npub static SLOTS: Array<Slot, 8> = Array::new();\nstatic OTHER: u32 = 1;";

fn of(source: &str) -> String {
    let sources = [
        ("a.rs".to_owned(), source.to_owned()),
        (
            "lib.rs".to_owned(),
            "pub const ABI_VERSION: u32 = 7;".to_owned(),
        ),
    ];
    description(&sources, MAP).unwrap()
}

#[test]
fn fields_discriminants_bits_and_maps_are_described_and_comments_are_not() {
    let text = of(r"
        /// A flow.
        #[repr(C, align(64))]
        #[derive(Clone)]
        pub struct Slot {
            /// Why.
            pub generation: u32,
            pub pad: [u8; 4],
        }
        pub struct NotStored { pub x: u32 }
        #[repr(u8)]
        enum Verdict { Fast = 1, Held, Drop = 9 }
        pub struct Bits;
        impl Bits { pub const HELD: u32 = 1 << 4; fn of(&self) {} }
        const _: () = assert!(true);
        fn rule() {}
    ");
    assert_eq!(
        text,
        "version 7\n\nstruct Slot repr (C , align (64))\n    generation: u32\n    pad: [u8 ; 4]\n\
         enum Verdict repr (u8)\n    Fast = 1\n    Held = 2\n    Drop = 9\n\
         const Bits::HELD: u32 = 1 << 4\nmap SLOTS: Array < Slot , 8 >\n"
    );
}

#[test]
fn what_changes_the_meaning_changes_the_description() {
    let base = "#[repr(C)] struct A { x: u32, y: u32 } #[repr(u8)] enum E { One = 1, Two }";
    for other in [
        "#[repr(C)] struct A { y: u32, x: u32 } #[repr(u8)] enum E { One = 1, Two }",
        "#[repr(C)] struct A { x: u32, y: u16 } #[repr(u8)] enum E { One = 1, Two }",
        "#[repr(C, align(8))] struct A { x: u32, y: u32 } #[repr(u8)] enum E { One = 1, Two }",
        "#[repr(C)] struct A { x: u32, y: u32 } #[repr(u8)] enum E { One = 2, Two }",
        "#[repr(C)] struct A { x: u32, y: u32 } #[repr(u8)] enum E { One = 1, Two, Held }",
        "#[repr(C)] struct A { x: u32, y: u32 } #[repr(u8)] enum E { Two = 1, One }",
    ] {
        assert_ne!(of(base), of(other), "{other}");
    }
    let commented = "/// What.\n#[repr(C)] struct A { /** Why. */ x: u32,\n y: u32 }\n\n\
                     #[repr(u8)] enum E { One = 1, /* so */ Two }";
    assert_eq!(of(base), of(commented));
}

#[test]
fn types_that_a_macro_makes_are_described_by_what_it_is_given() {
    let made = |reasons: &str| {
        of(&format!(
            "macro_rules! reasons {{ ($($r:ident)*) => {{ #[repr(u8)] enum R {{ $($r),* }} }} }} \
             reasons! {{ {reasons} }}"
        ))
    };
    assert_ne!(made("Tagged Denied"), made("Denied Tagged"));
    assert_eq!(
        made("Tagged Denied"),
        made("/// Why.\nTagged\n/// And.\nDenied")
    );
    // One that makes none is no part of it.
    assert_eq!(of("macro_rules! x { () => {} }"), of(""));
}

#[test]
fn another_description_needs_another_version() {
    let (before, after) = ("version 3\n\na\nb\nc\n", "version 3\n\na\nx\nc\n");
    assert_eq!(judge(before, before), Ok(()));
    let why = judge(before, after).unwrap_err();
    assert!(
        why.contains("raise ABI_VERSION") && why.ends_with("- b\n+ x\n"),
        "{why}"
    );
    let raised = after.replace("version 3", "version 4");
    let why = judge(before, &raised).unwrap_err();
    assert!(why.contains(WRITE) && !why.contains("raise"), "{why}");
    assert!(judge("", after).unwrap_err().contains(WRITE));
    // And it is not written over the old one's number.
    assert!(
        may_replace(before, after)
            .unwrap_err()
            .contains("raise ABI_VERSION")
    );
    assert_eq!(may_replace(before, &raised), Ok(()));
    assert_eq!(may_replace(before, before), Ok(()));
    assert_eq!(may_replace("", after), Ok(()));
    assert!(may_replace(&raised, before).is_err(), "an older one");
}

#[test]
fn sources_in_folders_are_read_and_decisions_store_no_constants() {
    let root = std::env::temp_dir().join(format!("slipgate-abi-{}", std::process::id()));
    fs::create_dir_all(root.join("rate")).unwrap();
    for file in [
        "vm.rs",
        "rate/budget.rs",
        "rate/budget_test.rs",
        "rate/notes.txt",
    ] {
        fs::write(root.join(file), file).unwrap();
    }
    let sources = read_sources(&root).unwrap();
    fs::remove_dir_all(&root).unwrap();
    let expected = ["rate/budget.rs", "vm.rs"].map(|name| (name.to_owned(), name.to_owned()));
    assert_eq!(sources, expected);
    assert!(is_stored("rate/budget.rs") && is_stored("datapath.rs"));
    assert!(!is_stored("datapath/arp.rs") && !is_stored("timeout.rs"));
}
