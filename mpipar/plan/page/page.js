// The page of a plan: everything but the title is in its cards already.
find("title").textContent = page.title;
theme();
