// The pictures are drawn already; only the head is filled in.
find("title").textContent = page.title;
find("subtitle").textContent = page.subtitle;
theme();
